"""The fast training pass's attention over the keys of step 0, through the fused kernel.

It returns the log-sum-exp of its scores. `eyas.training.steps` needs it to join each slot's own
keys of the later steps.
"""

from dataclasses import dataclass

import torch

from eyas.training.batch import Batch

# devices with the fused attention kernel that returns its log-sum-exp; plain products elsewhere
FUSED_ON = ("cpu",)


class PackedAttention:
    """Causal attention of the active slots over the keys of step 0, within each sample of a pack.

    All draft steps use it. Samples of about the same length go through the kernel together, padded
    to the longest of them. Heads that share keys are rows of one head.
    """

    def __init__(
        self,
        batch: Batch,
        keys: torch.Tensor,  # [S, kv heads, head_dim]
        values: torch.Tensor,  # [S, kv heads, head_dim]
        group: int,  # heads that share keys
    ):
        self.group = group
        self.scale = keys.shape[-1] ** -0.5
        self.like = keys
        self.parts: list[Part] = []
        device = keys.device
        span_ends = torch.tensor([end for _, end in batch.spans], device=device)
        ends = torch.searchsorted(batch.active, span_ends).tolist()
        # (minus the length, first and last row, first and last active slot); the longest first
        spans = sorted(
            (start - end, start, end, first, last)
            for (start, end), first, last in zip(batch.spans, [0, *ends], ends)
            if first < last
        )
        while spans:
            longest = spans[0][0]
            together = [span for span in spans if 2 * span[0] <= longest]  # half as long at least
            spans = spans[len(together) :]
            self.parts.append(self._part(batch, together, keys, values))

    def _part(self, batch: Batch, together: list[tuple], keys, values) -> "Part":
        """Return the padded keys, values and mask of samples that go through the kernel at once."""
        device, group = keys.device, self.group
        longest = -together[0][0]
        most = max(last - first for *_, first, last in together)
        key_spans = [(start, end) for _, start, end, _, _ in together]
        key_rows, key_places = _places(key_spans, longest, device)
        rows, places = _places([(first, last) for *_, first, last in together], most, device)
        starts = torch.tensor([start for _, start, *_ in together], device=device)
        own_key = batch.active[rows] - starts[places // most]  # its place within its sample
        seen = torch.full((len(together) * most,), longest, device=device)
        seen.index_copy_(0, places, own_key)
        mask = torch.zeros(len(together), 1, most * group, longest, dtype=keys.dtype, device=device)
        seen = seen.repeat_interleave(group).view(len(together), 1, -1, 1)
        mask.masked_fill_(torch.arange(longest, device=device) > seen, -torch.inf)
        size = (len(together), longest)
        k = _spread(keys, key_rows, key_places, size).transpose(1, 2)
        v = _spread(values, key_rows, key_places, size).transpose(1, 2)
        return Part(rows, places, (len(together), most), key_rows, key_places, k, v, mask, [])

    def __call__(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention as q [A, kv heads, group, head_dim], and its log-sum-exp.

        The log-sum-exp of the scores has the shape [A, kv heads, group].
        """
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for part in self.parts:
            o, log = _kernel(self._by_head(q, part), part.keys, part.values, part.mask, self.scale)
            out.index_copy_(0, part.rows, self._by_slot(o, part))
            log_sum.index_copy_(0, part.rows, self._by_slot(log[..., None], part)[..., 0])
        return out, log_sum

    def gradient(self, grad, q, out, log_sum) -> torch.Tensor:
        """Return the gradient by q. Those by keys and values are added up for `key_gradients`.

        `out` and `log_sum` may have come from more keys than these.
        """
        grad_q = torch.empty_like(q)
        for part in self.parts:
            log = self._by_head(log_sum[..., None], part)[..., 0].contiguous()
            by_q, *by_keys = _kernel_backward(
                self._by_head(grad, part),
                self._by_head(q, part),
                part.keys,
                part.values,
                self._by_head(out, part),
                log,
                part.mask,
                self.scale,
            )
            grad_q.index_copy_(0, part.rows, self._by_slot(by_q, part))
            if part.gradients:
                for total, more in zip(part.gradients, by_keys):
                    total += more
            else:
                part.gradients.extend(by_keys)
        return grad_q

    def key_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients by keys and values, [S, kv heads, head_dim] each, of all steps."""
        found = torch.zeros_like(self.like), torch.zeros_like(self.like)
        for part in self.parts:
            for total, grad in zip(found, part.gradients):
                total.index_copy_(
                    0,
                    part.key_rows,
                    grad.transpose(1, 2).flatten(0, 1).index_select(0, part.key_places),
                )
        return found

    def _by_head(self, x: torch.Tensor, part: "Part") -> torch.Tensor:
        """Return x [A, kv heads, group, d] as [samples, kv heads, most * group, d]."""
        return _spread(x, part.rows, part.places, part.size).transpose(1, 2).flatten(2, 3)

    def _by_slot(self, x: torch.Tensor, part: "Part") -> torch.Tensor:
        """Return x [samples, kv heads, most * group, d] as [slots, kv heads, group, d]."""
        return (
            x.unflatten(2, (-1, self.group))
            .transpose(1, 2)
            .flatten(0, 1)
            .index_select(0, part.places)
        )


@dataclass(frozen=True)
class Part:
    """Samples that go through the attention kernel together."""

    rows: torch.Tensor  # numbers of the active slots
    places: torch.Tensor  # the place of each when all samples are padded
    size: tuple[int, int]  # samples, and slots of each when padded
    key_rows: torch.Tensor
    key_places: torch.Tensor
    keys: torch.Tensor  # [samples, kv heads, keys when padded, head_dim]
    values: torch.Tensor
    mask: torch.Tensor  # [samples, 1, rows, keys], -inf where a key is behind the slot, or padding
    gradients: list[torch.Tensor]  # by keys and values, once there are some


def _places(
    spans: list[tuple[int, int]], longest: int, device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all spans, and their places when each span is padded to `longest`."""
    rows = torch.cat([torch.arange(start, end) for start, end in spans])
    places = torch.cat(
        [torch.arange(end - start) + n * longest for n, (start, end) in enumerate(spans)]
    )
    return rows.to(device), places.to(device)


def _spread(
    x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """Return the rows of x [n, ...] at their places and zeros elsewhere, [*size, ...]."""
    return (
        x.new_zeros(size[0] * size[1], *x.shape[1:])
        .index_copy_(0, places, x.index_select(0, rows))
        .unflatten(0, size)
    )


def _kernel(q, k, v, mask, scale):
    """Return attention as q, and the log-sum-exp of its scores [samples, heads, n].

    q [samples, heads, n, d]; k, v [samples, heads, keys, d]; mask [samples, 1, n, keys].
    """
    if q.device.type in FUSED_ON:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
    scores = (q @ k.transpose(-1, -2)).mul_(scale).add_(mask)
    log = scores.logsumexp(-1)
    return (scores - log[..., None]).exp_() @ v, log


def _kernel_backward(grad, q, k, v, out, log, mask, scale):
    """Return the gradients of q, k and v. `out` and `log` may have come from more keys."""
    if q.device.type in FUSED_ON:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log, 0.0, False, attn_mask=mask, scale=scale
        )
    weights = (q @ k.transpose(-1, -2)).mul_(scale).add_(mask).sub_(log[..., None]).exp_()
    grad_scores = (
        (grad @ v.transpose(-1, -2))
        .sub_((grad * out).sum(-1, keepdim=True))
        .mul_(weights)
        .mul_(scale)
    )
    return grad_scores @ k, grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
