"""The EAGLE-3 drafter in plain torch: the one definition of what a drafter computes.

The semantics are those of SGLang's `LlamaForCausalLMEagle3` (models/llama_eagle3.py of 0.5.23).
Slot j stands for position j of a text. It takes the target's hidden state j and token j+1, and
predicts token j+2:

    hidden [n, H] = fc([boundaries, ascending])      when drafting: the output of the step before
    x [n, 2H]     = [input_layernorm(embedding of token j+1), hidden_norm(hidden)]
    out [n, H]    = one Llama layer: hidden + attention(x), then + MLP; RoPE position j
    logits [n, D] = lm_head(norm(out))               over the draft vocabulary

Three callers run this layer. They differ in what a slot attends to:

- `Drafter.extend` is serving. A slot sees every slot before it (`DraftCache`), or a tree of them.
- `Drafter.first_step` and `Drafter.next_step` run K draft steps from many slots of one text at once
  (`DraftSteps`). The offline estimate (`eyas.evaluation.offline`) and the slow training pass
  (`eyas.training.reference`) use them.
- `eyas.training.steps` is the fast training pass: the same steps over many texts, with gradients
  written by hand. `tests/test_forward.py` proves that it equals this module.

- `out` before the norm is the hidden state of the next drafted slot; after it with `norm_output`.
- With `fc_norm` each boundary has its own RMSNorm before fc. SGLang uses the same two names.
- The embedding is the target's and stays frozen.
- Drafters that others trained may have more parts (`ImportedConfig`). They can be evaluated here.

The names of the weights are SGLang's. Axes: n slots, B boundaries, H hidden size, V target
vocabulary, D draft vocabulary, R slots that draft.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from eyas.errors import EyasError
from eyas.files import write_safetensors
from eyas.models.boundaries import check_boundaries
from eyas.models.target import Target
from eyas.models.vocab import DraftVocab, check_size

FILE = "drafter.safetensors"
BEST = "best.safetensors"  # of the longest held-out acceptance
IMPORTED = "imported.safetensors"  # the imported drafter that a training in its run continued
SCALED_ROPE = ("linear", "llama3", "yarn")  # kinds that do not depend on the length of the text


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter and the boundaries that feed it (ascending)."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    boundaries: tuple[int, ...]
    fc_norm: bool = False
    norm_output: bool = False
    # not fields: parts of `ImportedConfig` that a training does not start with
    norm_before_fc = norm_before_residual = own_embedding = False
    rope_scaling = None

    @classmethod
    def from_target(
        cls,
        target: Target,
        boundaries: tuple[int, ...],
        draft_vocab_size: int,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> "DrafterConfig":
        """Return the shape of a drafter whose layer has the target's own size.

        Raise EyasError for boundaries outside 0..N, or D larger than the vocabulary.
        """
        check_boundaries(boundaries, target.n_blocks)
        check_size(draft_vocab_size, target.vocab_size)
        text = target.config.get("text_config", target.config)
        n_heads = text["num_attention_heads"]
        rope = text.get("rope_parameters") or {}
        return cls(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            n_heads=n_heads,
            n_kv_heads=text.get("num_key_value_heads") or n_heads,
            head_dim=text.get("head_dim") or target.hidden_size // n_heads,
            intermediate_size=text["intermediate_size"],
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            max_position_embeddings=target.context_tok,
            boundaries=tuple(boundaries),
            fc_norm=fc_norm,
            norm_output=norm_output,
        )


@dataclass(frozen=True)
class ImportedConfig(DrafterConfig):
    """The shape of a drafter that others trained, with parts that our training does not start with.

    norm_before_fc: one RMSNorm over all boundaries together before fc (SGLang, speculators).
    norm_before_residual: the residual stream starts at the normed hidden state (speculators, vLLM).
    own_embedding: its embedding is not the target's. vLLM uses it; SGLang only uses it where the
        hidden sizes differ.
    rope_scaling: of a kind in SCALED_ROPE, as Hugging Face writes it.
    """

    norm_before_fc: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = False
    rope_scaling: dict | None = None


def rms_norm(
    x: torch.Tensor,  # [..., H]
    weight: torch.Tensor,  # [H]
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x, [..., H] in `dtype`, and the factor of each row, [..., 1].

    It is computed in the dtype of x. The fast training pass needs the factor for its gradient.
    """
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = (size.square() / x.shape[-1] + eps).rsqrt()
    return (x * scale).mul_(weight).to(dtype), scale


class RMSNorm(nn.Module):
    """Llama's RMSNorm, computed in float32 (float64 for float64 input), returned as the input's."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(wide, self.weight, self.eps, x.dtype)[0]


def apply_rope(
    x: torch.Tensor,  # [n, heads, head_dim]
    cos: torch.Tensor,  # [n, 1, head_dim / 2]
    sin: torch.Tensor,  # [n, 1, head_dim / 2]
) -> torch.Tensor:
    """Return x rotated by RoPE in Llama's (neox) form. With -sin it is the gradient of that."""
    a, b = x.chunk(2, dim=-1)
    left = torch.addcmul(a * cos, b, sin, value=-1)
    right = torch.addcmul(b * cos, a, sin)
    return torch.cat([left, right], dim=-1)


def scaled_rope(config: DrafterConfig) -> tuple[torch.Tensor, float]:
    """Return frequencies [head_dim / 2] of a scaled RoPE and its factor on cos and sin.

    Both are those of transformers. Raise EyasError for a kind that depends on the text's length.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = config.rope_scaling
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in SCALED_ROPE:
        raise EyasError(f"a drafter with RoPE of type {kind!r}", "default, linear, llama3 or yarn")
    parameters = {name: value for name, value in scaling.items() if name != "type"}
    parameters |= {"rope_type": kind, "rope_theta": config.rope_theta}
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.n_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))


class Attention(nn.Module):
    """The four projections of an EAGLE-3 layer (q, k and v read 2H) and its RoPE.

    Which slots attend to which is decided by the caller.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        width = 2 * config.hidden_size
        q_size = config.n_heads * config.head_dim
        kv_size = config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, q_size, bias=False)
        self.k_proj = nn.Linear(width, kv_size, bias=False)
        self.v_proj = nn.Linear(width, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.scaled_rope = scaled_rope(config) if config.rope_scaling else None

    def rope_tables(
        self,
        positions: torch.Tensor,  # [n]
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of these positions, [n, 1, head_dim / 2] each, for `apply_rope`."""
        half = self.config.head_dim // 2
        device = positions.device
        if self.scaled_rope is None:
            exponents = torch.arange(half, dtype=dtype, device=device) / half
            frequencies = self.config.rope_theta**-exponents
            factor = 1.0
        else:
            frequencies = self.scaled_rope[0].to(device, dtype)
            factor = self.scaled_rope[1]
        angles = positions.to(dtype)[:, None, None] * frequencies
        return angles.cos() * factor, angles.sin() * factor

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotated queries [n, heads, head_dim] of x [n, 2H] at `positions` [n]."""
        return self._rotate(self.q_proj(x).unflatten(-1, (self.config.n_heads, -1)), positions)

    def keys_values(
        self,
        x: torch.Tensor,  # [n, 2H]
        positions: torch.Tensor,  # [n]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated keys and the values, [n, kv heads, head_dim] each."""
        keys = self._rotate(self.k_proj(x).unflatten(-1, (self.config.n_kv_heads, -1)), positions)
        return keys, self.v_proj(x).unflatten(-1, (self.config.n_kv_heads, -1))

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x [n, heads, head_dim] in float32 (float64 for float64 input)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return apply_rope(x.to(wide), *self.rope_tables(positions, wide)).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One Llama layer. Attention reads [normed embedding, normed hidden] and adds to hidden."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def inputs(
        self,
        embeds: torch.Tensor,  # [n, H]
        hidden: torch.Tensor,  # [n, H]
    ) -> torch.Tensor:
        """Return what the projections read, [n, 2H]."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def finish(
        self,
        attended: torch.Tensor,  # [n, heads, head_dim]
        hidden: torch.Tensor,  # [n, H]
    ) -> torch.Tensor:
        """Return the raw output [n, H] of the layer, from its attention and its residual."""
        if self.norm_before_residual:
            hidden = self.hidden_norm(hidden)
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftCache:
    """Keys and values of the slots seen so far, for serving.

    They have the shape [kv heads, capacity, head_dim]. The first `length` slots count.
    """

    def __init__(self):
        self.length = 0
        self._keys = torch.empty(0, 0, 0)
        self._values = torch.empty(0, 0, 0)

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length

    def append(
        self,
        keys: torch.Tensor,  # [n, kv heads, head_dim]
        values: torch.Tensor,  # [n, kv heads, head_dim]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add n slots and return all keys and values, [kv heads, length, head_dim] each."""
        length = self.length + len(keys)
        if length > self._keys.shape[1]:
            self._keys = self._grown(self._keys, keys, 2 * length)
            self._values = self._grown(self._values, values, 2 * length)
        self._keys[:, self.length : length] = keys.transpose(0, 1)
        self._values[:, self.length : length] = values.transpose(0, 1)
        self.length = length
        return self._keys[:, :length], self._values[:, :length]

    def _grown(self, old: torch.Tensor, like: torch.Tensor, capacity: int) -> torch.Tensor:
        new = like.new_empty(like.shape[1], capacity, like.shape[2])
        if self.length:
            new[:, : self.length] = old[:, : self.length]
        return new


@dataclass
class DraftSteps:
    """What the draft steps of one text attend to. `Drafter.first_step` makes it.

    Step s at slot j sees the keys of step 0 of the slots up to j, as the cache of a server holds
    them, and the keys of the steps 1 .. s of slot j itself.
    """

    slots: torch.Tensor  # int64 [R], those that draft
    keys: torch.Tensor  # [n, kv heads, head_dim], step 0 of all slots of the text
    values: torch.Tensor  # [n, kv heads, head_dim]
    own: list[tuple[torch.Tensor, torch.Tensor]]  # of steps 1 .. s, [R, kv heads, head_dim] each

    def keep(self, chosen: torch.Tensor) -> None:
        """Go on with these of the slots that draft; chosen: bool [R]."""
        self.slots = self.slots[chosen]
        self.own = [(keys[chosen], values[chosen]) for keys, values in self.own]

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention of the slots that draft, [R, heads, head_dim], as the queries."""
        n, kv_heads, head_dim = self.keys.shape
        queries = queries.unflatten(1, (kv_heads, -1))  # [R, kv heads, group, head_dim]
        unseen = torch.arange(n, device=queries.device) > self.slots[:, None]  # [R, n]
        scores = torch.einsum("rkgd,nkd->rkgn", queries, self.keys)
        scores = scores.masked_fill(unseen[:, None, None], -torch.inf)
        own = [(queries * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in self.own]
        scores = torch.cat([scores, *own], dim=-1)  # [R, kv heads, group, n + s]
        weights = (scores * head_dim**-0.5).softmax(-1)
        attended = torch.einsum("rkgn,nkd->rkgd", weights[..., :n], self.values)
        for i, (_, values) in enumerate(self.own):
            attended = attended + weights[..., n + i, None] * values[:, :, None]
        return attended.flatten(1, 2)


class Drafter(nn.Module):
    """An EAGLE-3 drafter of this shape with random weights; `vocab` is its draft vocabulary."""

    def __init__(self, config: DrafterConfig, vocab: DraftVocab):
        super().__init__()
        if (len(vocab.ids), vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise EyasError(
                f"a draft vocabulary of {len(vocab.ids)} of {vocab.vocab_size} tokens",
                f"{config.draft_vocab_size} of {config.vocab_size}",
            )
        self.config, self.vocab = config, vocab
        eps = config.rms_norm_eps
        fused_size = len(config.boundaries) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(fused_size, config.hidden_size, bias=False)
        self.input_norm = RMSNorm(fused_size, eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, eps) for _ in config.boundaries]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden [n, H] of the target's states [n, B*H], boundaries in ascending order."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.split(self.config.target_hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(states)

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Return the hidden state [n, H] that the next step reads, from a raw output [n, H]."""
        return self.norm(out) if self.config.norm_output else out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Return logits over the draft vocabulary [m, D] of raw outputs [m, H]."""
        return self.lm_head(self.norm(out))

    def extend(
        self,
        token_ids: torch.Tensor,  # int64 [n], token j+1 of each slot j
        hidden: torch.Tensor,  # [n, H], fused states, or what the slot before fed back
        cache: DraftCache,
        positions: torch.Tensor | None = None,  # [n]
        seen: torch.Tensor | None = None,  # bool [n, length of the cache with these slots]
    ) -> torch.Tensor:
        """Run n more slots and return their raw outputs [n, H]. Their keys and values are cached.

        They attend to all slots before them and to themselves. The slots of a tree come with their
        `positions` and with what they attend to, `seen`.
        """
        layer, start = self.layers[0], cache.length
        if positions is None:
            positions = torch.arange(start, start + len(token_ids), device=hidden.device)  # [n]
        x = layer.inputs(self.embed_tokens(token_ids), hidden)  # [n, 2H]
        queries = layer.self_attn.queries(x, positions).transpose(0, 1)  # [heads, n, head_dim]
        keys, values = cache.append(*layer.self_attn.keys_values(x, positions))
        if seen is None:
            seen = torch.arange(cache.length, device=hidden.device) <= positions[:, None]
        attended = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
        )[0]  # [heads, n, head_dim]
        return layer.finish(attended.transpose(0, 1), hidden)

    def first_step(
        self,
        token_ids: torch.Tensor,  # int64 [n], token j+1 of every slot j of a text
        hidden: torch.Tensor,  # [n, H], its fused states
        slots: torch.Tensor,  # int64 [R], those that draft
    ) -> tuple[torch.Tensor, DraftSteps]:
        """Run step 0 and return the raw outputs [R, H] of the slots that draft, and their keys."""
        layer = self.layers[0]
        x = layer.inputs(self.embed_tokens(token_ids), hidden)  # [n, 2H]
        positions = torch.arange(len(x), device=x.device)
        steps = DraftSteps(slots, *layer.self_attn.keys_values(x, positions), own=[])
        queries = layer.self_attn.queries(x[slots], slots)
        return layer.finish(steps.attend(queries), hidden[slots]), steps

    def next_step(
        self,
        token_ids: torch.Tensor,  # int64 [R], token j+1+s of each slot j that drafts
        hidden: torch.Tensor,  # [R, H], what the step before fed back
        steps: DraftSteps,
    ) -> torch.Tensor:
        """Run step s = 1, 2, ... and return its raw outputs [R, H]."""
        layer = self.layers[0]
        x = layer.inputs(self.embed_tokens(token_ids), hidden)  # [R, 2H]
        positions = steps.slots + len(steps.own) + 1
        steps.own.append(layer.self_attn.keys_values(x, positions))
        return layer.finish(steps.attend(layer.self_attn.queries(x, positions)), hidden)


def initial_drafter(
    config: DrafterConfig,
    vocab: DraftVocab,
    target: Target,
    seed: int,
    from_target: bool = True,
    last_rms: float = 1.0,
) -> Drafter:
    """Return a drafter to start training from, in float32.

    It takes from the target what has the same shape:
    - The target's last block, final norm, and rows of the head for the draft vocabulary.
    - The hidden half of q, k and v: the last block's, which reads hidden states already. The
      embedding half is zero.
    - fc passes the last boundary through. Where a norm before fc has taken the size away, it is
      multiplied by `last_rms`, the root mean square of the states of that boundary.

    What the target has no such weight for (an MoE's MLP, another attention) stays random, by
    `seed`. With `from_target` false everything but the embedding is random.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config, vocab)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.embedding())
    if not from_target:
        return drafter
    h, block, head = config.hidden_size, target.last_block(), target.head()
    layer = drafter.layers[0]
    with torch.no_grad():
        drafter.norm.weight.copy_(head.norm_weight)
        drafter.lm_head.weight.copy_(head.lm_head[vocab.ids])
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -h:].fill_diagonal_(last_rms if config.fc_norm else 1.0)
        for name, parameter in layer.named_parameters():
            if name == "input_layernorm.weight":
                continue
            source = block.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
            if (
                name.startswith(("self_attn.q", "self_attn.k", "self_attn.v"))
                and source is not None
                and 2 * source.shape[1] == parameter.shape[1]
            ):
                parameter[:, :h] = 0.0
                parameter[:, h:] = source
            elif source is not None and source.shape == parameter.shape:
                parameter.copy_(source)
    return drafter


def save_drafter(drafter: Drafter, folder: Path, record: dict, name: str = FILE) -> Path:
    """Write the drafter as one file, whole or absent, and return its path.

    The file holds the trained weights, the ids of the vocabulary, the shape, and `record`: what the
    drafter was made from. The target's embedding is left out. `load_drafter` compares
    `record["target"]`, name and fingerprint, with its target.
    """
    weights = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in drafter.state_dict().items()
        if name != "embed_tokens.weight" or drafter.config.own_embedding
    }
    metadata = {
        "format": "pt",
        "drafter": json.dumps({"config": dataclasses.asdict(drafter.config), "record": record}),
    }
    return write_safetensors(
        Path(folder) / name, weights | {"vocab.ids": drafter.vocab.ids}, metadata
    )


def read_record(folder: Path, name: str = FILE) -> dict:
    """Return the record that `save_drafter` wrote. Raise EyasError where there is no drafter."""
    return _read_metadata(Path(folder) / name)["record"]


def load_drafter(folder: Path, target: Target, name: str = FILE) -> Drafter:
    """Return the drafter that a training or an import saved, in float32.

    It gets the target's embedding if it has none of its own. Raise EyasError for a missing or torn
    file, a drafter of another target, or weights of another shape.
    """
    path = Path(folder) / name
    described = _read_metadata(path)
    made_for = described["record"].get("target", {})
    if made_for.get("fingerprint") != target.fingerprint:
        fingerprint = str(made_for.get("fingerprint"))[:12]
        raise EyasError(
            "the drafter was trained for another target: "
            f"{made_for.get('name')} ({fingerprint}...)",
            f"{target.name} ({target.fingerprint[:12]}...)",
            "train one for this target: python -m eyas train -p run_name NAME",
        )
    shape = {**described["config"], "boundaries": tuple(described["config"]["boundaries"])}
    config = (ImportedConfig if "norm_before_fc" in shape else DrafterConfig)(**shape)
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}
    drafter = Drafter(config, DraftVocab(weights.pop("vocab.ids"), config.vocab_size))
    if not config.own_embedding:
        weights["embed_tokens.weight"] = target.embedding().float()
    for key, tensor in drafter.state_dict().items():
        if key not in weights or weights[key].shape != tensor.shape:
            found = f"of shape {list(weights[key].shape)}" if key in weights else "missing"
            raise EyasError(
                f"{key} of the drafter is {found}",
                f"shape {list(tensor.shape)}, from its own description",
                "train it again",
            )
    drafter.load_state_dict(weights)
    return drafter


def _read_metadata(path: Path) -> dict:
    run = path.parent.parent.name
    if not path.is_file() and path.name == BEST:
        raise EyasError(
            f"no best weights in run {run!r}",
            f"a {BEST}, which a training with held-out samples keeps",
            "-p drafter_weights final",
        )
    if not path.is_file():
        raise EyasError(
            f"no drafter in {path.parent.name!r} of run {run!r}",
            f"a {FILE}",
            f"python -m eyas train -p run_name {run}; one that others trained: "
            f"python -m eyas drafter import FOLDER -p run_name {run}",
        )
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["drafter"])
    except (SafetensorError, KeyError, TypeError) as error:
        raise EyasError(
            f"{path.name} of run {path.parent.parent.name!r} can't be read: {error}",
            "a whole file of `save_drafter`",
            "train it again",
        ) from None
