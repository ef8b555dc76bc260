"""Attention of the drafter over a pack: the keys of step 0 through the fused kernel, joined with the slot's own keys."""

from dataclasses import dataclass

import torch

from eyas.training.batch import Batch

FUSED_ON = (
    "cpu",
)  # devices with the fused attention kernel that gives its log-sum-exp; plain products elsewhere


class Attention:
    """Causal attention of the active slots over the keys of step 0, within each sample, for all steps of a pack.

    Samples of about the same length go through the kernel together, padded to the longest of them; heads that share keys are rows of one head.
    keys, values [S, kv heads, head_dim].
    """

    def __init__(self, batch: Batch, keys: torch.Tensor, values: torch.Tensor, group: int):
        self.group, self.scale, self.like, self.parts = group, keys.shape[-1] ** -0.5, keys, []
        device = keys.device
        ends = torch.searchsorted(
            batch.active, torch.tensor([end for _, end in batch.spans], device=device)
        ).tolist()
        spans = sorted(
            (start - end, start, end, a, b)
            for (start, end), a, b in zip(batch.spans, [0, *ends], ends)
            if a < b
        )  # the longest first
        while spans:
            together = [
                span for span in spans if 2 * span[0] <= spans[0][0]
            ]  # at least half as long as the longest
            spans = spans[len(together) :]
            longest, most = -together[0][0], max(b - a for *_, a, b in together)
            key_rows, key_places = _places(
                [(start, end) for _, start, end, _, _ in together], longest, device
            )
            rows, places = _places([(a, b) for *_, a, b in together], most, device)
            starts = torch.tensor([start for _, start, *_ in together], device=device)
            seen = torch.full((len(together) * most,), longest, device=device).index_copy_(
                0, places, batch.active[rows] - starts[places // most]
            )  # place of its own key
            mask = torch.zeros(
                len(together), 1, most * group, longest, dtype=keys.dtype, device=device
            )
            mask.masked_fill_(
                torch.arange(longest, device=device)
                > seen.repeat_interleave(group).view(len(together), 1, -1, 1),
                -torch.inf,
            )
            size = (len(together), longest)
            k, v = (
                _spread(x, key_rows, key_places, size).transpose(1, 2) for x in (keys, values)
            )  # [samples, kv heads, longest, head_dim]
            self.parts.append(
                Part(rows, places, (len(together), most), key_rows, key_places, k, v, mask, [])
            )

    def __call__(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [A, kv heads, group, head_dim] -> output as q, log-sum-exp of the scores [A, kv heads, group]."""
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for part in self.parts:
            o, log = _kernel(self._by_head(q, part), part.keys, part.values, part.mask, self.scale)
            out.index_copy_(0, part.rows, self._by_slot(o, part))
            log_sum.index_copy_(0, part.rows, self._by_slot(log[..., None], part)[..., 0])
        return out, log_sum

    def gradient(self, grad, q, out, log_sum) -> torch.Tensor:
        """By q, from an output and a log-sum-exp that may have come from more keys than these; the keys' own gradients are kept."""
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
        """By keys and values, [S, kv heads, head_dim] each, of all steps that were asked for."""
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
        """[A, kv heads, group, d] -> [samples, kv heads, most * group, d]."""
        return _spread(x, part.rows, part.places, part.size).transpose(1, 2).flatten(2, 3)

    def _by_slot(self, x: torch.Tensor, part: "Part") -> torch.Tensor:
        """[samples, kv heads, most * group, d] -> [slots of the part, kv heads, group, d]."""
        return (
            x.unflatten(2, (-1, self.group))
            .transpose(1, 2)
            .flatten(0, 1)
            .index_select(0, part.places)
        )


@dataclass(frozen=True)
class Part:
    """Samples that go through the attention kernel together."""

    rows: torch.Tensor  # active slots, by their number
    places: torch.Tensor  # where each stands when all samples are padded
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
    """(rows of all spans, their places when each span is padded to `longest`)."""
    rows = torch.cat([torch.arange(start, end) for start, end in spans])
    places = torch.cat(
        [torch.arange(end - start) + n * longest for n, (start, end) in enumerate(spans)]
    )
    return rows.to(device), places.to(device)


def _spread(
    x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """Rows of x [n, ...] to their places, zeros elsewhere: [*size, ...]."""
    return (
        x.new_zeros(size[0] * size[1], *x.shape[1:])
        .index_copy_(0, places, x.index_select(0, rows))
        .unflatten(0, size)
    )


def _kernel(q, k, v, mask, scale):
    """q [samples, heads, n, d], k and v [samples, heads, keys, d], mask [samples, 1, n, keys] -> output as q, log-sum-exp of the scores [samples, heads, n]."""
    if q.device.type in FUSED_ON:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
    scores = (q @ k.transpose(-1, -2)).mul_(scale).add_(mask)
    log = scores.logsumexp(-1)
    return (scores - log[..., None]).exp_() @ v, log


def _kernel_backward(grad, q, k, v, out, log, mask, scale):
    """Gradients of q, k and v, from an output and a log-sum-exp that may have come from more keys than these."""
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
