"""Run EAGLE3 on the plain CPU: plain torch for what SGLang's worker asks of a device's kernels.

- SGLang's own `EAGLEWorkerV2` drafts and verifies.
- `PlainEagleWorker`, which the platform's `get_speculative_worker_cls` returns, replaces Triton
  kernels by the functions of OPS, in the modules that call them.
- Nothing is replaced unless a server starts with a drafter.
- The parameters have the names of SGLang's functions; `missing` checks that.

Axis names: R requests, K levels drafted, n tokens of a verify step, V vocabulary.
"""

import importlib
import inspect

import torch

from eyas_cpu.attention import PlainAttention, PlainDraftAttention, window


def draft_slots(
    req_pool_indices,
    req_to_token,
    seq_lens,
    out_cache_loc,
    topk,
    num_cols,
    positions=None,
    mrope=None,
) -> None:
    """Write to `out_cache_loc` where draft tokens write their keys.

    These are the `topk * num_cols` slots after each request's committed tokens.
    """
    out_cache_loc.view(len(seq_lens), -1).copy_(
        window(req_to_token, req_pool_indices, seq_lens, topk * num_cols)
    )


def verify_slots(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
) -> torch.Tensor:
    """Return the slots [R * n] where a verify step writes its keys.

    It is the platform's `get_speculative_cache_locs_fn`.
    """
    return window(req_to_token, req_pool_indices, start_offset, draft_token_num).flatten()


def write_slots(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
) -> None:
    """Write newly allocated slots into the table, one request after the other.

    They belong to the tokens from `start_offset` up to `end_offset` of each request.
    """
    done = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[request, start:end] = out_cache_loc[done : done + end - start]
        done += end - start


def bonus_tokens(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size) -> None:
    """Write the last accepted token of each request; `accept_lens` counts it."""
    last = accept_lens[:, None].long() - 1  # [R, 1]
    bonus_tokens.copy_(accept_tokens.view(batch_size, accept_stride).gather(1, last)[:, 0])


def best_children(i, topk_p, topk_index, hidden_states, scores, topk):
    """Return level i of the drafts: the `topk` best of all children.

    The result is (tokens, states of their parents, scores, level). The level is (scores, tokens,
    parents), as `organize_draft_results` gathers them. A node's score is its parent's times its own
    probability. Parents are places among all proposals so far: level 0 is -1, then the topk of
    level 1 follow.

    SGLang's function is the same under `torch.compile`, which needs a C++ compiler and half a
    minute.
    """
    if i == 0:  # [R, topk] of the last committed token
        return (
            topk_index.flatten(),
            hidden_states.repeat_interleave(topk, 0),
            topk_p,
            (topk_p[:, None], topk_index, torch.arange(-1, topk).expand(len(topk_p), -1)),
        )
    requests = len(scores)
    # [R, topk parents, topk children]
    scores = scores[:, :, None] * topk_p.view(requests, topk, topk)
    tokens = topk_index.view(requests, topk * topk)
    kept, place = scores.flatten(1).topk(topk)  # [R, topk]
    parents = (place // topk + torch.arange(0, requests * topk, topk)[:, None]).flatten()
    return (
        tokens.gather(1, place).flatten(),
        hidden_states[parents],
        kept,
        (scores, tokens, place + topk + topk * topk * (i - 1)),
    )


def build_tree(
    parent_list,
    top_scores_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode,
) -> None:
    """Build the tree of a verify step: its mask, its positions and its links.

    The links are those by which verification walks: a node's child, and its next sibling; -1 at the
    end. `tree_mask` is QLEN_ONLY: [R, n, n] flattened.
    Node 0 is the last committed token, node i the (i-1)-th best draft. The draft at place p of all
    proposals was proposed for parent p // topk. `parent_list` has the place of that parent; parent
    0 is node 0.
    """
    n = num_verify_tokens
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    see = tree_mask.view(-1, n, n)
    see.copy_(torch.eye(n, dtype=torch.bool))
    depth = torch.zeros_like(retrieve_index)  # [R, n]
    for r, (places, parents) in enumerate(
        zip(top_scores_index.tolist(), parent_list.tolist(), strict=True)
    ):
        node_at = {place: i for i, place in enumerate(places, start=1)}
        child = [-1 for _ in range(n)]
        sibling = [-1 for _ in range(n)]
        # From the worst draft on, so that the best sibling is met first
        for i in range(n - 1, 0, -1):
            parent = places[i - 1] // topk and node_at[parents[places[i - 1] // topk]]
            sibling[i] = child[parent]
            child[parent] = i
        for i, place in enumerate(places, start=1):  # parents come before their children
            parent = place // topk and node_at[parents[place // topk]]
            see[r, i] |= see[r, parent]
            depth[r, i] = depth[r, parent] + 1
        retrieve_next_token[r] = torch.tensor(child)
        retrieve_next_sibling[r] = torch.tensor(sibling)
    positions.copy_((seq_lens[:, None] + depth).flatten())


def verify_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
    topk=-1,
):
    """Walk from the root to the child that is the target's own choice, as far as there is one.

    `predicts` receives that choice at every node of the path, with the bonus token last.
    """
    n = candidates.shape[1]
    for r, (drafted, wanted, child, sibling) in enumerate(
        zip(
            candidates.tolist(),
            target_predict.tolist(),
            retrieve_next_token.tolist(),
            retrieve_next_sibling.tolist(),
            strict=True,
        )
    ):
        path = [0]
        node = child[0]
        while node != -1 and len(path) < accept_index.shape[1]:
            if drafted[node] == wanted[path[-1]]:
                path.append(node)
                node = child[node]
            else:
                node = sibling[node]
        accept_index[r, : len(path)] = torch.tensor(path) + r * n
        accept_token_num[r] = len(path) - 1
        predicts[r * n + torch.tensor(path)] = torch.tensor(
            [wanted[node] for node in path], dtype=predicts.dtype
        )
    return predicts, accept_index, accept_token_num


def verify_sampled(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
) -> None:
    """Verify as `verify_greedy` does, with tokens drawn from `target_probs` [R, n, V].

    One random number a node decides (multi-round rejection sampling). A child is accepted as soon
    as the number is below the sum of the children's probabilities so far. If no child is accepted,
    the last token is drawn from the probability that they leave.
    """
    n = candidates.shape[1]
    for r, (drafted, coins, child, sibling) in enumerate(
        zip(
            candidates.tolist(),
            uniform_samples.tolist(),
            retrive_next_token.tolist(),
            retrive_next_sibling.tolist(),
            strict=True,
        )
    ):
        path = [0]
        node = child[0]
        tried = []
        mass = 0.0
        while node != -1 and len(path) < accept_index.shape[1]:
            probability = float(target_probs[r, path[-1], drafted[node]])
            mass += probability
            if coins[path[-1]] <= mass / threshold_acc or probability >= threshold_single:
                path.append(node)
                node = child[node]
                tried = []
                mass = 0.0
            else:
                tried.append(drafted[node])
                node = sibling[node]
        left = target_probs[r, path[-1]].double()
        left[tried] = 0
        left = left.cumsum(0)
        drawn = uniform_samples_for_final_sampling[r].double() * left[-1]
        last = int(torch.searchsorted(left, drawn, right=True).clamp(max=len(left) - 1))
        accept_index[r, : len(path)] = torch.tensor(path) + r * n
        accept_token_num[r] = len(path) - 1
        predicts[r * n + torch.tensor(path)] = torch.tensor(
            [*(drafted[node] for node in path[1:]), last], dtype=predicts.dtype
        )


def keep_top_k(probs, top_ks) -> torch.Tensor:
    """Return the `top_ks` [N] likeliest of each row of `probs` [N, V], normalised."""
    values, ids = probs.topk(min(int(top_ks.max()), probs.shape[1]))
    return _normalised(probs, ids, values.where(torch.arange(values.shape[1]) < top_ks[:, None], 0))


def keep_top_p(probs, top_ps) -> torch.Tensor:
    """Return the likeliest of each row that together reach `top_ps` [N], normalised."""
    values, ids = probs.sort(descending=True)
    return _normalised(probs, ids, values.where(values.cumsum(1) - values < top_ps[:, None], 0))


def _normalised(probs, ids, kept) -> torch.Tensor:
    return torch.zeros_like(probs).scatter(1, ids, kept / kept.sum(1, keepdim=True))


def tree_mask_mode():
    """Return the mode whose masks are [R, n, n]: a verify step's own tokens only.

    All of them see everything before.
    """
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    return TreeMaskMode.QLEN_ONLY


def front_slots(num_front, out_cache_loc, front_out_cache_loc) -> None:
    """Write the first `num_front[r]` slots of each request's verify window, in their order.

    The rest of the output is unchanged.
    """
    slots = out_cache_loc.view(len(num_front), -1)
    front = slots[torch.arange(slots.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(front)] = front


def accepted_slots(accept_index, out_cache_loc, accept_out_cache_loc, size) -> None:
    """Write the slots of the accepted nodes, in the same order."""
    slots = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


class PlainDraftBackends:
    """Replace SGLang's `DraftBackendFactory`, which has no `torch_native`."""

    def __init__(
        self,
        draft_model_runner,
        topk,
        speculative_num_steps,
        seed_dsa_topk_from_draft_extend=False,
        qsa_profile=None,
    ):
        self.runner = draft_model_runner
        self.topk = topk
        self.steps = speculative_num_steps

    def create_decode_backend(self):
        """Return None if no draft token is fed back: draft-extend gives a single level."""
        if self.steps <= 1:
            return None
        backend = _named(PlainDraftAttention(self.runner, self.topk, self.steps))
        for step in backend.attn_backends:
            _named(step)
        return backend

    def create_draft_extend_backend(self):
        return _named(PlainAttention(self.runner))


def _named(backend):
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend


_SPECULATIVE = "sglang.srt.speculative"
OPS = {  # name in the module that calls it -> what replaces it
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": write_slots,
    f"{_SPECULATIVE}.eagle_worker_v2.DraftBackendFactory": PlainDraftBackends,
    f"{_SPECULATIVE}.eagle_worker_v2.default_tree_mask_mode": tree_mask_mode,
    f"{_SPECULATIVE}.eagle_worker_v2.select_top_k_tokens": best_children,
    f"{_SPECULATIVE}.eagle_worker_common.assign_draft_cache_locs_contiguous_func": draft_slots,
    f"{_SPECULATIVE}.eagle_worker_common.fill_bonus_tokens_func": bonus_tokens,
    f"{_SPECULATIVE}.eagle_utils.build_tree_kernel_efficient_func": build_tree,
    f"{_SPECULATIVE}.eagle_utils.verify_tree_greedy_func": verify_greedy,
    # The next three are None where SGLang has no kernel.
    f"{_SPECULATIVE}.eagle_utils.tree_speculative_sampling_target_only": verify_sampled,
    f"{_SPECULATIVE}.eagle_utils.top_k_renorm_prob": keep_top_k,
    f"{_SPECULATIVE}.eagle_utils.top_p_renorm_prob": keep_top_p,
    f"{_SPECULATIVE}.spec_utils.fill_front_out_cache_loc_func": front_slots,
    f"{_SPECULATIVE}.spec_utils.fill_accept_out_cache_loc_func": accepted_slots,
}


def missing() -> list[str]:
    """Return the names of OPS that this SGLang does not have, or with other parameters.

    If there are any, nothing may be replaced.
    """
    wrong = []
    for name, plain in OPS.items():
        module, _, attribute = name.rpartition(".")
        installed = getattr(importlib.import_module(module), attribute, NotImplemented)
        exists = installed is not NotImplemented
        if not exists or not _fits(installed, plain):
            wrong.append(name)
    return wrong


def _fits(installed, plain) -> bool:
    """Return whether a function of SGLang has the parameters of ours; None has no parameters."""
    if installed in (None, plain):
        return True
    return list(inspect.signature(installed).parameters) == list(
        inspect.signature(plain).parameters
    )


def put_in_place() -> None:
    """Replace what OPS names.

    Raise RuntimeError, which ends the server, if this SGLang has something else there.
    """
    wrong = missing()
    if wrong:
        raise RuntimeError(
            "eyas_cpu: not as in the SGLang that this was made for: " + ", ".join(wrong)
        )
    for name, plain in OPS.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, plain)


def worker_class() -> type:
    """Return SGLang's EAGLE worker with the plain functions in place before it is built.

    Its modules are imported here, because they import most of SGLang.
    """
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    class PlainEagleWorker(EAGLEWorkerV2):
        def __init__(self, *args, **kwargs):
            if get_spec().speculative_use_rejection_sampling:
                raise NotImplementedError(
                    "eyas_cpu: --speculative-use-rejection-sampling has no plain-torch form;"
                    " leave it out, sampled requests are verified all the same"
                )
            put_in_place()
            super().__init__(*args, **kwargs)

    return PlainEagleWorker
