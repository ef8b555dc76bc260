"""The plain-torch operations of eyas_cpu.eagle beside SGLang's own Triton kernels, interpreted, in
a process of its own (SGLang keeps process-wide state).

    TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 SGLANG_PLATFORM=eyas_cpu python
    tests/helpers/sglang_eagle_ops.py

Prints {operation: how many cases were equal} as JSON; an operation that differs ends it. Sampled
verification has no such kernel here: its output is
drawn many times and printed as counts, for the caller to compare with the target's distribution.
"""

import json

import torch
from sglang.kernels.ops.speculative import cache_locs, spec_tree
from sglang.kernels.ops.speculative import eagle as sglang_eagle
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import eagle_utils, spec_utils
from sglang.srt.speculative.eagle_utils import organize_draft_results

import eyas_cpu
from eyas_cpu import eagle, linear
from eyas_cpu.platform import PlainCpuPlatform

SETTINGS = [
    (1, 1, 2),
    (3, 1, 4),
    (5, 1, 6),
    (1, 3, 4),
    (2, 2, 5),
    (3, 3, 10),
    (4, 4, 8),
    (3, 4, 13),
    (3, 2, 2),
]  # steps, topk, tokens of a verify step
REQUESTS, V = 3, 40
equal: dict[str, int] = {}


def same(name: str, ours, theirs) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (
            mine.shape == other.shape and torch.equal(mine.long(), other.long())
            if not mine.is_floating_point()
            else torch.equal(mine, other)
        ), (name, mine, other)
    equal[name] = equal.get(name, 0) + 1


def draft(steps: int, topk: int):
    """Random drafts, level by level, each level by both: what `organize_draft_results` gathers."""
    children = torch.rand(REQUESTS, V).softmax(-1).topk(topk)
    probs, ids, hidden, scores, levels = (
        children.values,
        children.indices,
        torch.rand(REQUESTS, 5),
        None,
        [],
    )
    for i in range(steps):
        mine = eagle.best_children(i, probs, ids, hidden, scores, topk)
        theirs = spec_utils.select_top_k_tokens(i, probs, ids, hidden, scores, topk)
        same("select_top_k_tokens", [*mine[:3], *mine[3]], [*theirs[:3], *theirs[3]])
        _, hidden, scores, info = mine
        levels.append(info)
        children = torch.rand(REQUESTS * topk, V).softmax(-1).topk(topk)
        probs, ids = children.values, children.indices
    return map(list, zip(*levels))


def trees() -> None:
    for steps, topk, n in SETTINGS:
        scores, tokens, parents = draft(steps, topk)
        parent_list, places, drafts = organize_draft_results(scores, tokens, parents, n)
        lengths = torch.tensor([7, 1, 300])
        built = []
        for build in (eagle.build_tree, spec_tree.sgl_build_tree_kernel_triton):
            out = [
                torch.full((REQUESTS * n * n,), True),
                torch.zeros(REQUESTS * n, dtype=torch.long),
                *torch.full((3, REQUESTS, n), -1),
            ]
            build(
                parent_list, places, lengths, *out, topk, steps, n, spec_tree.TreeMaskMode.QLEN_ONLY
            )
            built.append(out)
        same("build_tree", *built)
        seen, _, index, child, sibling = built[0]
        candidates = torch.cat([torch.randint(V, (REQUESTS, 1)), drafts], 1)
        for _ in range(8):
            wanted = torch.randint(V, (REQUESTS, n))
            for r in range(REQUESTS):  # the target's choice is a child of most nodes
                for node in range(n):
                    children = [
                        i
                        for i in range(1, n)
                        if seen.view(-1, n, n)[r, i, node]
                        and seen.view(-1, n, n)[r, i].sum()
                        == seen.view(-1, n, n)[r, node].sum() + 1
                    ]
                    if children and torch.rand(()) < 0.8:
                        wanted[r, node] = candidates[
                            r, children[int(torch.randint(len(children), ()))]
                        ]
            verified = []
            for verify in (eagle.verify_greedy, spec_tree.verify_tree_greedy_triton):
                out = [
                    torch.zeros(REQUESTS * n, dtype=torch.int32),
                    torch.full((REQUESTS, steps + 1), -1, dtype=torch.int32),
                    torch.empty(REQUESTS, dtype=torch.int32),
                ]
                verify(*out, candidates, index, child, sibling, wanted)
                verified.append(out)
            same("verify_greedy", *verified)
            predict, accept_index, accepted = verified[0]
            slots = torch.randperm(500)[: REQUESTS * n]
            for name, mine, theirs in (
                ("fill_front", eagle.front_slots, cache_locs.fill_front_out_cache_loc_func),
                ("fill_accept", eagle.accepted_slots, sglang_eagle.fill_accept_out_cache_loc_func),
            ):
                given = (
                    (accepted + 1, slots)
                    if name == "fill_front"
                    else (accept_index.flatten(), slots)
                )
                out = torch.zeros(2, accept_index.numel(), dtype=torch.long)
                mine(*given, out[0], *[accept_index.numel()] * (name == "fill_accept"))
                theirs(*given, out[1], *[accept_index.numel()] * (name == "fill_accept"))
                same(name, out[:1], out[1:])
            out = torch.zeros(2, REQUESTS, dtype=torch.int32)
            for fill, row in (
                (eagle.bonus_tokens, out[0]),
                (sglang_eagle.fill_bonus_tokens_func, out[1]),
            ):
                fill(predict[accept_index], accepted + 1, row, accept_index.shape[1], REQUESTS)
            same("bonus_tokens", out[:1], out[1:])


def slots() -> None:
    table = torch.randperm(4 * 64, dtype=torch.int32).view(4, 64)
    requests, lengths = torch.tensor([3, 1, 0]), torch.tensor([5, 0, 40])
    for topk, steps in ((1, 3), (4, 5)):
        out = torch.zeros(2, REQUESTS * topk * steps, dtype=torch.long)
        eagle.draft_slots(requests, table, lengths, out[0], topk, steps)
        cache_locs.assign_draft_cache_locs_contiguous_func(
            requests, table, lengths, out[1], topk, steps
        )
        same("draft_slots", out[:1], out[1:])
        theirs = torch.zeros(REQUESTS * steps, dtype=torch.long)
        cache_locs.assign_extend_cache_locs[(REQUESTS,)](
            requests, table, lengths, lengths + steps, theirs, table.shape[1], 4
        )
        same(
            "verify_slots",
            [eagle.verify_slots(requests, table, lengths, lengths + steps, REQUESTS, steps, "cpu")],
            [theirs],
        )
        ends = lengths + torch.tensor([4, 0, 7])
        new, tables = torch.arange(1000, 1011), [table.clone(), table.clone()]
        eagle.write_slots(requests, tables[0], lengths, ends, new, REQUESTS)
        allocation.assign_req_to_token_pool_func(requests, tables[1], lengths, ends, new, REQUESTS)
        same("write_slots", tables[:1], tables[1:])


def sampled(draws: int = 4000) -> dict:
    """A tree of 6 nodes:

    1 and 2 below the root, 3 and 4 below 1, 5 below 3. Counts of the first two tokens that come
    out, and the target's probabilities.
    """
    probs = (
        torch.tensor([0.9, 2.0, 1.2, 0.4, 1.7])
        .repeat(6, 1)
        .log()
        .add(torch.randn(6, 5))
        .softmax(-1)
    )
    child, sibling = torch.tensor([1, 3, -1, 5, -1, -1]), torch.tensor([-1, 2, -1, 4, -1, -1])
    tokens = torch.tensor([0, 2, 4, 1, 0, 3])

    def many(x):
        return x.expand(draws, *x.shape)

    predict, index, accepted = (
        torch.zeros(draws * 6, dtype=torch.int32),
        torch.full((draws, 4), -1, dtype=torch.int32),
        torch.empty(draws, dtype=torch.int32),
    )
    eagle.verify_sampled(
        predict,
        index,
        accepted,
        many(tokens),
        torch.arange(draws * 6).view(draws, 6),
        many(child),
        many(sibling),
        torch.rand(draws, 6),
        torch.rand(draws),
        many(probs),
        None,
    )
    first = predict.view(draws, 6)[:, 0].long()
    after_2 = [
        int(predict[index[r, 1]]) for r in range(draws) if first[r] == 2
    ]  # token 2 is node 1
    return {
        "first": first.bincount(minlength=5).tolist(),
        "root": probs[0].tolist(),
        "second": torch.tensor(after_2).bincount(minlength=5).tolist(),
        "node": probs[1].tolist(),
        "accepted": accepted.bincount(minlength=4).tolist(),
    }


def kept() -> None:
    probs = torch.rand(4, V).softmax(-1)
    for mine, limits, keeps in (
        (eagle.keep_top_k, torch.tensor([1, 3, 1 << 30, V]), lambda order, p, k: order[:k]),
        (
            eagle.keep_top_p,
            torch.tensor([0.01, 0.5, 1.0, 0.9]),
            lambda order, p, limit: order[
                : next(i for i in range(1, V + 1) if i == V or p[order[:i]].sum() >= limit)
            ],
        ),
    ):
        for row, p, limit in zip(mine(probs, limits), probs, limits.tolist()):
            only = (
                torch.zeros(V).index_put(
                    (keeps(p.argsort(descending=True), p, limit),), torch.ones(())
                )
                * p
            )
            torch.testing.assert_close(row, only / only.sum())
    equal["keep"] = 1


def products() -> None:
    """Of 1, 2, 32 and 33 tokens with a weight, by a model's linear layers after the platform's
    turn: as near to the exact ones as SGLang's.
    """
    layer = torch.nn.Module()
    layer.quant_method, layer.weight = UnquantizedLinearMethod(), torch.randn(96, 64).bfloat16()
    theirs = layer.quant_method.apply
    linear.use_in(layer)
    assert type(layer.quant_method) is linear.FewTokens
    for n in (1, 2, linear.MOST_TOK, linear.MOST_TOK + 1):
        x = torch.randn(n, 64).bfloat16()
        exact = x.double() @ layer.weight.double().t()
        mine, other = (
            out.double() - exact for out in (layer.quant_method.apply(layer, x), theirs(layer, x))
        )
        assert (
            mine.shape == other.shape
            and mine.abs().max() <= 1.01 * other.abs().max() + 2**-8 * exact.abs().max() / 2
        ), n
    equal["linear"] = 4


def gone() -> list[str]:
    """What the plugin's own check says: of this SGLang, of one where an operation takes something
    else, of one whose platforms are not asked for something.
    """
    said, there = [eyas_cpu.check()["detail"]], eagle_utils.build_tree_kernel_efficient_func
    eagle_utils.build_tree_kernel_efficient_func = lambda parents: None
    said.append(eyas_cpu.check()["detail"])
    eagle_utils.build_tree_kernel_efficient_func = there
    PlainCpuPlatform.get_what_is_gone = lambda self: None
    said.append(eyas_cpu.check()["detail"])
    del PlainCpuPlatform.get_what_is_gone
    return said


torch.manual_seed(0)
products()
trees()
slots()
kept()
print(json.dumps({"equal": equal, "sampled": sampled(), "said": gone()}))
