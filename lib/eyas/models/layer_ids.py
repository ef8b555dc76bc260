"""Translate between our boundaries and the layer ids of other projects.

    python -m eyas drafter layer-ids   # every engine, version and family, with their default ids

- `engine_ids` translates boundaries to ids, and `engine_boundaries` ids to boundaries.
- Each rule was read in the engine's own source. SGLang's is tested against the installed one,
  family by family.
- Only the standard library is imported: `python -m eyas doctor` runs where packages are missing.
"""

from eyas.errors import EyasError

SGLANG = "sglang 0.5.23"

# What an id x means:
#   boundary: boundary x
#   after:    the output of block x, so boundary x + 1
#   first_1:  as `after` if the first id is 1, otherwise boundary x
#   last_N:   boundary x if the largest id is N, otherwise as `after`
# SGLang's rules by architecture of the target. Kimi-K2.5 passes its ids to deepseek_v2.
FAMILIES = {
    SGLANG: {
        "after": (
            "ApertusForCausalLM",
            "BailingMoEForCausalLM",
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "ExaoneMoEForCausalLM",
            "ExaoneMoeForCausalLM",
            "Gemma4ForCausalLM",
            "Glm4MoeForCausalLM",
            "InternLM3ForCausalLM",
            "LlamaForCausalLM",
            "MiniMaxM2ForCausalLM",
            "MiniMaxM3SparseForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
            "MistralForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
        ),
        "first_1": (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "KimiK25ForConditionalGeneration",
            "MistralLarge3ForCausalLM",
        ),
        "last_N": ("GptOssForCausalLM",),
    }
}
# Rules of others, the same for every family. A trainer that counts the blocks of Hugging Face's
# model is `after`.
RULES = {
    "vllm": "boundary",
    "speculators": "boundary",
    "eagle": "boundary",
    "speculators-v1": "after",
    "angelslim": "after",
    "modelopt": "after",
    "torchspec": "after",
    "automodel": "after",
}
# specforge passes its ids, by default 1, N//2-1, N-4, to SGLang's own method.
THROUGH = {"specforge": SGLANG}
VERSIONS = {
    "speculators": ">= 0.5",
    "speculators-v1": "0.3, 0.4",
    "specforge": "0.2.0",
    "eagle": "its own code",
    "modelopt": "Hugging Face backend",
}
ENGINES = (*FAMILIES, *THROUGH, *RULES)
# Their default are the ids 2, N//2, N-3, each read as `after`.
PLUS_ONE = ("speculators-v1", "MiniMaxM3SparseForConditionalGeneration")


def rule(engine: str, architecture: str) -> str:
    """Return what an id means to this engine for a target of this architecture.

    Raise EyasError if the engine or the architecture is not known.
    """
    if engine in RULES:
        return RULES[engine]
    engine = THROUGH.get(engine, engine)
    if engine not in FAMILIES:
        raise EyasError(
            f"layer ids of {engine} are not known",
            "one of " + ", ".join(ENGINES),
            "python -m eyas drafter layer-ids",
        )
    for name, family in FAMILIES[engine].items():
        if architecture in family:
            return name
    raise EyasError(
        f"layer ids of {architecture} in {engine} are not known",
        "one of " + ", ".join(sorted(sum(FAMILIES[engine].values(), ()))),
        "python -m eyas drafter layer-ids",
    )


def engine_ids(
    boundaries: tuple[int, ...], architecture: str, n_blocks: int, engine: str = SGLANG
) -> list[int]:
    """Return the ids by which this engine takes exactly these (ascending) boundaries.

    Raise EyasError if it cannot take them, boundary N above all. Most of SGLang's families capture
    before a block runs, and no block runs on boundary N. Trainers that read Hugging Face's states
    get it after the final norm. The order of ids has no meaning for SGLang, which captures while it
    walks the blocks.
    """
    name = rule(engine, architecture)
    ascending = list(boundaries) == sorted(set(boundaries))
    if not boundaries or not ascending or boundaries[0] < 0 or boundaries[-1] > n_blocks:
        raise EyasError(
            f"boundaries {list(boundaries)}", f"ascending ids from 0 to {n_blocks}, none twice"
        )
    has_last = boundaries[-1] == n_blocks
    if name == "boundary" or (name == "last_N" and has_last):
        return list(boundaries)
    if has_last and name != "last_N":
        reason = "its last state stands after the final norm"
        if engine not in RULES:
            reason = "it captures what enters a block, and no block follows"
        raise EyasError(
            f"{engine} cannot serve a drafter fed from boundary {n_blocks} of {architecture}:"
            f" {reason}",
            f"boundaries below {n_blocks}",
            "choose other boundaries and train again, e.g. -p boundaries '[2, N//2, N-3]'",
        )
    if name != "first_1":
        return [b - 1 for b in boundaries]
    if boundaries[0] != 1:  # ids are boundaries as long as the first one is not 1
        return list(boundaries)
    if len(boundaries) == 1:
        raise EyasError(
            f"{engine} cannot capture boundary 1 alone of {architecture}:"
            " it reads a first id of 1 as boundary 2",
            "another choice",
        )
    return [*boundaries[1:], 1]  # so 1 goes last


def engine_boundaries(
    ids: list[int] | None, architecture: str, n_blocks: int, engine: str = SGLANG
) -> tuple[int, ...]:
    """Return the boundaries, ascending, that this engine takes for these ids.

    All of them are concatenated. `None` means the engine's own default. Raise EyasError if the
    engine cannot take the ids.
    """
    name = rule(engine, architecture)
    if ids is None:
        plus = engine in PLUS_ONE or (architecture in PLUS_ONE and engine in FAMILIES)
        boundaries = tuple(b + plus for b in (2, n_blocks // 2, n_blocks - 3))
    else:
        plain = (
            name == "boundary"
            or (name == "first_1" and ids[0] != 1)
            or (name == "last_N" and max(ids) == n_blocks)
        )
        boundaries = tuple(sorted(ids if plain else [x + 1 for x in ids]))
    # Beyond `last` nothing is captured, or something after the final norm.
    last = n_blocks if name in ("boundary", "last_N") else n_blocks - 1
    different = list(boundaries) == sorted(set(boundaries))
    if not different or not 0 <= boundaries[0] <= boundaries[-1] <= last:
        which = f"layer ids {list(ids)}" if ids is not None else "the default layer ids"
        raise EyasError(
            f"{which} are boundaries {list(boundaries)} of {architecture} to {engine}",
            f"different ones from 0 to {last}",
        )
    return boundaries


def round_trip(
    n_blocks: int, architecture: str | None = None, boundaries: tuple[int, ...] | None = None
) -> list[dict]:
    """Return one row for each engine and family, or for this architecture.

    A row has the ids of these boundaries (or of the engine's default), or why there are none.
    """
    rows = []
    for engine, members in _groups(architecture):
        version = engine.partition(" ")[2] or VERSIONS.get(engine, "")
        row = {"engine": engine.split()[0], "version": version}
        try:
            row["an id x is"] = rule(engine, members[0])
            row["its default"] = list(engine_boundaries(None, members[0], n_blocks, engine))
            wanted = list(boundaries or row["its default"])
            row |= {
                "boundaries": wanted,
                "ids": str(engine_ids(tuple(wanted), members[0], n_blocks, engine)),
            }
        except EyasError as error:
            row["ids"] = error.found
        rows.append(row | {"family": ", ".join(m.removesuffix("ForCausalLM") for m in members)})
    return rows


def round_trip_text(rows: list[dict]) -> str:
    """Return the rows of `round_trip` as a Markdown table."""
    columns = ["engine", "version", "an id x is", "its default", "ids", "family"]
    if any(row.get("boundaries") != row.get("its default") for row in rows):
        columns.insert(4, "boundaries")
    lines = [[str(row.get(name, "")).strip("[]") for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *lines)]
    rule_line = "|" + "|".join("-" * (width + 2) for width in widths) + "|"

    def table_line(texts: list[str]) -> str:
        padded = [text.ljust(width) for text, width in zip(texts, widths)]
        return f"| {' | '.join(padded)} |"

    return "\n".join([table_line(columns), rule_line, *map(table_line, lines)])


def _groups(architecture: str | None):
    """Yield (engine, architectures that it reads alike)."""
    for engine in ENGINES:
        if architecture or engine in RULES:
            yield engine, (architecture or "any",)
            continue
        for family in FAMILIES[THROUGH.get(engine, engine)].values():
            yield engine, tuple(m for m in family if m not in PLUS_ONE or engine in THROUGH)
            if engine not in THROUGH:
                yield from ((engine, (m,)) for m in family if m in PLUS_ONE)
