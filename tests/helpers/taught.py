"""A drafter for a tiny target, taught on the target's own greedy responses, a little: some of its
drafts are accepted and some are not.
"""

import torch

from eyas.evaluation.decode import TargetStream, greedy_decode
from eyas.models.drafter import DraftCache, Drafter, DrafterConfig
from eyas.models.vocab import DraftVocab


def make_prompts(vocab: int = 512, lengths: tuple[int, ...] = (1, 2, 7, 19, 40)) -> list[list[int]]:
    """Random prompts of these lengths, the special tokens left out."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def teach(
    target,
    model,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    draft_vocab_size: int = 384,
    levels: int = 1,
    ids: torch.Tensor | None = None,
) -> Drafter:
    """Train on 30 greedy tokens after each prompt, 15 passes, for about two seconds. `levels` more
    than 1: to draft from its own output too, all slots one level on.

    `ids`: the draft vocabulary, ascending; otherwise `draft_vocab_size` tokens at random.
    """
    torch.manual_seed(0)
    ids = torch.randperm(target.vocab_size)[:draft_vocab_size].sort().values if ids is None else ids
    drafter = Drafter(
        DrafterConfig.from_target(target, boundaries, len(ids)), DraftVocab(ids, target.vocab_size)
    )
    drafter.embed_tokens.weight.data.copy_(target.embedding().float())
    drafter.embed_tokens.requires_grad_(False)
    texts = []
    for prompt in prompts:
        tokens = prompt + greedy_decode(model, prompt, 30).tokens
        with TargetStream(model, boundaries) as stream, torch.no_grad():
            texts.append((torch.tensor(tokens), stream.forward(tokens, keep=1)[1].float()))
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(15):
        for tokens, states in texts:
            hidden, loss = drafter.fuse(states[:-2]), 0.0
            for level in range(levels):
                out = drafter.extend(tokens[level + 1 : -1], hidden, DraftCache())
                wanted = drafter.vocab.to_draft(tokens[level + 2 :])
                loss = loss + torch.nn.functional.cross_entropy(
                    drafter.logits(out)[wanted >= 0], wanted[wanted >= 0]
                )
                hidden = drafter.feed_back(out)[:-1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval()
