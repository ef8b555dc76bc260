"""The EAGLE-3 drafter in plain torch, with the semantics of SGLang's `LlamaForCausalLMEagle3` (models/llama_eagle3.py of 0.5.23).

Slot j stands for position j of a text: it takes the target's hidden state j and token j+1, and predicts token j+2.

    hidden [n, H] = fc([boundaries, ascending])                             fuse; for a drafted slot: the output of the slot before it (feed_back)
    x [n, 2H]     = [input_layernorm(embedding of token j+1), hidden_norm(hidden)]
    out [n, H]    = one Llama layer: hidden + attention(x), then + MLP      RoPE position j
    logits [n, D] = lm_head(norm(out))                                      over the draft vocabulary

`out` before the norm is what is fed back as the hidden state of the next drafted slot, after the norm with `norm_output`; with `fc_norm` each
boundary has an RMSNorm of its own before fc (both as SGLang names them). The embedding is the target's and stays frozen.
Drafters that others trained may have more (`ImportedConfig`): these parts are judged here, and only an embedding of its own is trained with.
The names of the weights are SGLang's. Axes: n slots, B boundaries, H hidden size, V target vocabulary, D draft vocabulary.
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
    # not fields: what `ImportedConfig` has beside these, and training does not do
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
        """A layer of the target's own size. EyasError: boundaries outside 0..N; D larger than the vocabulary."""
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
    """The shape of a drafter that others trained, with the parts that SGLang or speculators have and our training does not start with."""

    norm_before_fc: bool = (
        False  # one RMSNorm over all boundaries together before fc (SGLang, speculators)
    )
    norm_before_residual: bool = (
        False  # the residual stream starts at the normed hidden state (speculators, vLLM)
    )
    own_embedding: bool = False  # its embedding is not the target's (vLLM uses it; SGLang only where the hidden sizes differ)
    rope_scaling: dict | None = None  # of type linear, llama3 or yarn, as Hugging Face has it


class RMSNorm(nn.Module):
    """As Llama's: computed in float32 (float64 for float64 input), given back in the dtype of the input."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (
            wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        ).to(x.dtype)


class Attention(nn.Module):
    """The four projections of an EAGLE-3 layer (q, k and v take 2H) and RoPE; which slots attend to which is the caller's business."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(
            2 * config.hidden_size, config.n_heads * config.head_dim, bias=False
        )
        self.k_proj = nn.Linear(
            2 * config.hidden_size, config.n_kv_heads * config.head_dim, bias=False
        )
        self.v_proj = nn.Linear(
            2 * config.hidden_size, config.n_kv_heads * config.head_dim, bias=False
        )
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.hidden_size, bias=False)
        self.scaled_rope = scaled_rope(config) if config.rope_scaling else None

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, 2H], positions [n] -> [n, heads, head_dim], rotated."""
        return self._rotate(self.q_proj(x).unflatten(-1, (self.config.n_heads, -1)), positions)

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, 2H], positions [n] -> keys (rotated) and values, [n, kv heads, head_dim] each."""
        keys = self._rotate(self.k_proj(x).unflatten(-1, (self.config.n_kv_heads, -1)), positions)
        return keys, self.v_proj(x).unflatten(-1, (self.config.n_kv_heads, -1))

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE in Llama's (neox) form, computed in float32 (float64 for float64 input). x [n, heads, head_dim]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        half = self.config.head_dim // 2
        if self.scaled_rope is None:
            frequencies, factor = (
                self.config.rope_theta ** -(torch.arange(half, dtype=wide, device=x.device) / half),
                1.0,
            )  # [head_dim/2]
        else:
            frequencies, factor = self.scaled_rope[0].to(x.device, wide), self.scaled_rope[1]
        angles = (positions.to(wide)[:, None] * frequencies)[:, None, :]  # [n, 1, head_dim/2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        a, b = x.to(wide).split(half, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def scaled_rope(config: DrafterConfig) -> tuple[torch.Tensor, float]:
    """Frequencies [head_dim/2] and the factor on cos and sin of a scaled RoPE, as transformers computes them. EyasError for a kind that depends on the text's length."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_scaling.get("rope_type", config.rope_scaling.get("type"))
    if kind not in ("linear", "llama3", "yarn"):
        raise EyasError(f"a drafter with RoPE of type {kind!r}", "default, linear, llama3 or yarn")
    parameters = {name: value for name, value in config.rope_scaling.items() if name != "type"} | {
        "rope_type": kind,
        "rope_theta": config.rope_theta,
    }
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.n_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One Llama layer whose attention reads [normed embedding, normed hidden] and whose residual stream is the hidden state."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, normed_embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings after `input_layernorm` [n, H] and hidden states [n, H] -> [n, 2H], what the projections read."""
        return torch.cat([normed_embeds, self.hidden_norm(hidden)], dim=-1)

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """attended [n, heads, head_dim] and the residual stream [n, H] -> the raw output [n, H]."""
        hidden = (
            self.hidden_norm(hidden) if self.norm_before_residual else hidden
        ) + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftCache:
    """Keys and values of the slots seen so far, [kv heads, capacity, head_dim], of which the first `length` count."""

    def __init__(self):
        self.length = 0
        self._keys = self._values = torch.empty(0, 0, 0)

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add n slots, [n, kv heads, head_dim] each; gives all keys and values, [kv heads, length, head_dim]."""
        length = self.length + len(keys)
        if length > self._keys.shape[1]:
            grown = [keys.new_empty(keys.shape[1], 2 * length, keys.shape[2]) for _ in range(2)]
            for new, old in zip(grown, (self._keys, self._values)):
                if self.length:
                    new[:, : self.length] = old[:, : self.length]
            self._keys, self._values = grown
        self._keys[:, self.length : length] = keys.transpose(0, 1)
        self._values[:, self.length : length] = values.transpose(0, 1)
        self.length = length
        return self._keys[:, :length], self._values[:, :length]


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
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(
            len(config.boundaries) * config.target_hidden_size, config.hidden_size, bias=False
        )
        self.input_norm = (
            RMSNorm(len(config.boundaries) * config.target_hidden_size, config.rms_norm_eps)
            if config.norm_before_fc
            else None
        )
        self.fc_norm = (
            nn.ModuleList(
                [RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.boundaries]
            )
            if config.fc_norm
            else None
        )
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states, boundaries concatenated in ascending order [n, B*H] -> hidden [n, H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.split(self.config.target_hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(states)

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Raw output [n, H] of a slot -> the hidden state [n, H] of the slot drafted next."""
        return self.norm(out) if self.config.norm_output else out

    def extend(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: DraftCache,
        positions: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run n more slots, which attend to all slots before them and to themselves; their keys and values join the cache.

        token_ids: int64 [n], token j+1 of each slot j; hidden [n, H]: fused states, or what the slot before fed back. Gives the raw output [n, H].
        The slots of a tree come with their `positions` [n] and with what they attend to, `seen`: bool [n, length of the cache with them].
        """
        layer, start = self.layers[0], cache.length
        if positions is None:
            positions = torch.arange(start, start + len(token_ids), device=hidden.device)  # [n]
        x = layer.inputs(layer.input_layernorm(self.embed_tokens(token_ids)), hidden)  # [n, 2H]
        queries = layer.self_attn.queries(x, positions).transpose(0, 1)  # [heads, n, head_dim]
        keys, values = cache.append(
            *layer.self_attn.keys_values(x, positions)
        )  # [kv heads, length, head_dim]
        mask = (
            seen
            if seen is not None
            else torch.arange(cache.length, device=hidden.device) <= positions[:, None]
        )  # [n, length]
        attended = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )[0]
        return layer.finish(attended.transpose(0, 1), hidden)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Raw output [m, H] -> logits over the draft vocabulary [m, D]."""
        return self.lm_head(self.norm(out))


def initial_drafter(
    config: DrafterConfig,
    vocab: DraftVocab,
    target: Target,
    seed: int,
    from_target: bool = True,
    last_rms: float = 1.0,
) -> Drafter:
    """A drafter to start training from, in float32: the target's last block, final norm and head where the shapes agree.

    The hidden half of q, k and v starts as the last block's (it reads hidden states already), the embedding half at zero; fc passes the
    last boundary through (times `last_rms`, the root mean square of its states, where a norm before fc has taken that away); the head is the
    target's rows of the draft vocabulary. What the target has no such weight for (an MoE's MLP, another attention) stays random, by `seed`;
    with `from_target` false everything does but the embedding.
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
    """Write the drafter as one file, whole or absent: the trained weights, the ids of its vocabulary, its shape and `record` (what it was made from).

    The target's embedding is left out. `record["target"]`, with name and fingerprint, is what `load_drafter` compares. Gives the file's path.
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
    """What `save_drafter` was told. EyasError where there is no drafter."""
    return _read_metadata(Path(folder) / name)["record"]


def load_drafter(folder: Path, target: Target, name: str = FILE) -> Drafter:
    """The drafter that training or an import saved, with the target's embedding if it has none of its own, in float32. EyasError: none there, a torn file, another target's, another shape."""
    path = Path(folder) / name
    described = _read_metadata(path)
    made_for = described["record"].get("target", {})
    if made_for.get("fingerprint") != target.fingerprint:
        raise EyasError(
            f"the drafter was trained for another target: {made_for.get('name')} ({str(made_for.get('fingerprint'))[:12]}...)",
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
            f"python -m eyas train -p run_name {run}; one that others trained: python -m eyas import-drafter FOLDER -p run_name {run}",
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
