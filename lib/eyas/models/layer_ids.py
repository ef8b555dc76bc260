"""The one place where another project's layer ids and our boundaries meet: `engine_ids` one way, `engine_boundaries` the other.

    python -m eyas drafter layer-ids      # every engine, version and family: default ids, and the boundaries that they are

Each rule is read from the engine's own source; SGLang's is tested against the installed one, family by family. Nothing but the standard
library is imported here: `python -m eyas doctor` uses it where packages are missing.
"""

from eyas.errors import EyasError

SGLANG = "sglang 0.5.23"

# What an id x means:
#   boundary: boundary x
#   after:    what leaves block x, so boundary x + 1
#   first_1:  as `after` when the first id is 1, else boundary x
#   last_N:   boundary x when the largest id is N, else as `after`
# Of SGLang, by architecture of the target. Kimi-K2.5 hands its ids to deepseek_v2.
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
# Of others, which read alike for every family. A trainer that counts the blocks of Hugging Face's model is `after`.
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
THROUGH = {
    "specforge": SGLANG
}  # it hands its ids, by default 1, N//2-1, N-4, to SGLang's own method
VERSIONS = {
    "speculators": ">= 0.5",
    "speculators-v1": "0.3, 0.4",
    "specforge": "0.2.0",
    "eagle": "its own code",
    "modelopt": "Hugging Face backend",
}
ENGINES = (*FAMILIES, *THROUGH, *RULES)
PLUS_ONE = (
    "speculators-v1",
    "MiniMaxM3SparseForConditionalGeneration",
)  # whose default are the ids 2, N//2, N-3, each read as `after`


def rule(engine: str, architecture: str) -> str:
    """What an id means to this engine for a target of this architecture. EyasError for either where it isn't known."""
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
    """The ids by which this engine takes exactly these (ascending) boundaries of a target of that architecture.

    EyasError for a choice that it cannot take, boundary N first of all: most of SGLang's families capture before a block runs, and no block runs on
    boundary N; trainers that read Hugging Face's states find it after the final norm. The order of ids carries no meaning for SGLang (it captures
    while it walks the blocks).
    """
    name = rule(engine, architecture)
    if (
        not boundaries
        or list(boundaries) != sorted(set(boundaries))
        or boundaries[0] < 0
        or boundaries[-1] > n_blocks
    ):
        raise EyasError(
            f"boundaries {list(boundaries)}", f"ascending ids from 0 to {n_blocks}, none twice"
        )
    if name == "boundary" or name == "last_N" and boundaries[-1] == n_blocks:
        return list(boundaries)
    if boundaries[-1] == n_blocks and name != "last_N":
        why = (
            "it captures what enters a block, and no block follows"
            if engine not in RULES
            else "its last state stands after the final norm"
        )
        raise EyasError(
            f"{engine} cannot serve a drafter fed from boundary {n_blocks} of {architecture}: {why}",
            f"boundaries below {n_blocks}",
            "choose other boundaries and train again, e.g. -p boundaries '[2, N//2, N-3]'",
        )
    if (
        name == "first_1" and boundaries[0] != 1
    ):  # ids are boundaries as long as the first one is not 1 ...
        return list(boundaries)
    if name == "first_1":
        if len(boundaries) == 1:
            raise EyasError(
                f"{engine} cannot capture boundary 1 alone of {architecture}: it reads a first id of 1 as boundary 2",
                "another choice",
            )
        return [*boundaries[1:], 1]  # ... so it goes last
    return [b - 1 for b in boundaries]


def engine_boundaries(
    ids: list[int] | None, architecture: str, n_blocks: int, engine: str = SGLANG
) -> tuple[int, ...]:
    """The boundaries that this engine takes for these ids, ascending, as all of them concatenate. `None` is its own default. EyasError for what it cannot take."""
    name = rule(engine, architecture)
    if ids is None:
        plus = engine in PLUS_ONE or architecture in PLUS_ONE and engine in FAMILIES
        boundaries = tuple(b + plus for b in (2, n_blocks // 2, n_blocks - 3))
    else:
        plain = (
            name == "boundary"
            or (name == "first_1" and ids[0] != 1)
            or (name == "last_N" and max(ids) == n_blocks)
        )
        boundaries = tuple(sorted(ids if plain else [x + 1 for x in ids]))
    last = (
        n_blocks if name in ("boundary", "last_N") else n_blocks - 1
    )  # beyond it nothing is captured, or something after the final norm
    if (
        list(boundaries) != sorted(set(boundaries))
        or not 0 <= boundaries[0] <= boundaries[-1] <= last
    ):
        said = f"layer ids {list(ids)}" if ids is not None else "the default layer ids"
        raise EyasError(
            f"{said} are boundaries {list(boundaries)} of {architecture} to {engine}",
            f"different ones from 0 to {last}",
        )
    return boundaries


def round_trip(
    n_blocks: int, architecture: str | None = None, boundaries: tuple[int, ...] | None = None
) -> list[dict]:
    """A row for each engine and each family of it, or for this architecture: the ids of these boundaries (or of the engine's default), or why there are none."""
    rows = []
    for engine, members in _groups(architecture):
        row = {
            "engine": engine.split()[0],
            "version": engine.partition(" ")[2] or VERSIONS.get(engine, ""),
        }
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
    """What `round_trip` gives as a Markdown table."""
    asked = any(row.get("boundaries") != row.get("its default") for row in rows)
    columns = (
        "engine",
        "version",
        "an id x is",
        "its default",
        *["boundaries"] * asked,
        "ids",
        "family",
    )
    lines = [[str(row.get(name, "")).strip("[]") for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *lines]) for i in range(len(columns))]
    rule_line = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    shown = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths)) + " |"
        for line in [columns, *lines]
    ]
    return "\n".join([shown[0], rule_line, *shown[1:]])


def _groups(architecture: str | None):
    """(engine, architectures that it reads alike)."""
    for engine in ENGINES:
        if architecture or engine in RULES:
            yield engine, (architecture or "any",)
            continue
        for family in FAMILIES[THROUGH.get(engine, engine)].values():
            yield engine, tuple(m for m in family if m not in PLUS_ONE or engine in THROUGH)
            if engine not in THROUGH:
                yield from ((engine, (m,)) for m in family if m in PLUS_ONE)
