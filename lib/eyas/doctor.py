"""Check that everything Eyas needs is installed. `python -m eyas doctor` prints one screen.

- `python -m eyas doctor --target FOLDER` checks instead whether a target is supported, step by step
  of the road. Its config.json alone is enough.
- Each of the two plugins is applied in a process of its own, because SGLang only logs a hook that
  fails.
- This module imports only the standard library, so that it also works where packages are missing.
"""

import contextlib
import difflib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eyas import __version__
from eyas.errors import EyasError
from eyas.files import ROOT, data_dir, read_json
from eyas.models.boundaries import MIN_BLOCKS, default_boundaries
from eyas.models.layer_ids import SGLANG, engine_ids, round_trip, round_trip_text, rule
from eyas.models.sglang_source import SETTER, architectures, family, multimodal_architectures
from eyas.progress import bytes_text

GIB = 2**30
PLUGINS = {  # package -> entry-point group
    "eyas_capture": "sglang.srt.plugins",
    "eyas_cpu": "sglang.srt.platforms",
}
# The check imports SGLang's scheduler: 10 s on a quiet machine, minutes on a busy one.
PLUGIN_TIMEOUT_S = 600.0
# What the demo needs, rounded up
DATA_BYTES = 3 * GIB
TEMPORARY_BYTES = GIB // 2
MEMORY_BYTES = 4 * GIB
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Check:
    """Hold the result of one check.

    ok: None for what is only reported or is not needed. command: what to type if `ok` is False.
    """

    name: str
    ok: bool | None
    detail: str
    command: str = ""


def doctor() -> list[Check]:
    """Run every check, in the order of the screen."""
    gpu = lock_path().name == "gpu.txt"
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    temporary = Path(tempfile.gettempdir())
    n_cores = len(os.sched_getaffinity(0))
    return [
        check_python(sys.version_info[:3]),
        check_packages(lock_path()),
        _check_sglang(gpu),
        *check_plugins(needed=("eyas_capture",) if gpu else tuple(PLUGINS)),
        check_kernelspec(),
        check_disk(
            "data folder", data_dir(), DATA_BYTES, "set EYAS_DATA to a folder on a larger disk"
        ),
        check_disk(
            "temporary folder",
            temporary,
            TEMPORARY_BYTES,
            "set TMPDIR to a folder on a larger disk",
        ),
        check_memory(meminfo),
        Check(
            "cores",
            None,
            f"{n_cores} usable; settings `threads` of a profile says how many are used",
        ),
        check_target(),
        check_browser(),
    ]


def _check_sglang(gpu: bool) -> Check:
    version = _installed("sglang")
    command = "rm -f .venv/.ready && make doctor"
    if version is None:
        return Check("SGLang", False, "not installed", command)
    kernels = "in full, with GPU kernels" if gpu else "without GPU kernels: device cpu"
    return Check("SGLang", True, f"{version}, {kernels}", command)


def screen(
    checks: list[Check], well: str = "Everything that is needed is here; next: make demo"
) -> str:
    """Return one line for each check, then the command for each failed one.

    `well` is the last line if none failed.
    """
    marks = {True: "ok", False: "WRONG", None: "-"}
    lines = [f"Eyas {__version__}", *(f"  {marks[c.ok]:6}{c.name:21}{c.detail}" for c in checks)]
    wrong = [c for c in checks if c.ok is False]
    if not wrong:
        return "\n".join([*lines, well])
    return "\n".join([*lines, "What to do:", *(f"  {c.name}: {c.command}" for c in wrong)])


def target_doctor(name: str) -> tuple[list[Check], str]:
    """Run every check of a target; return them, and its table of layer ids.

    `name` is 'embedded', a Hugging Face folder, or a folder with a config.json alone. The table is
    empty if the family is not known.
    """
    folder = Path(name).expanduser()
    if name == "embedded":
        folder = data_dir() / "targets" / "SmolLM2-135M-Instruct"
    try:
        config = read_json(folder / "config.json")
        text = config.get("text_config", config)
        n_blocks = text["num_hidden_layers"]
        architecture = config["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return [_unreadable_config(name, folder, error)], ""
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    checks = [
        _check_config(folder, architecture, text),
        *check_family(architecture),
        *check_boundaries(architecture, n_blocks),
        check_dtype(text, config),
        check_code(config),
        *check_tokenizer(folder, text.get("vocab_size", 0)),
        *check_processor(folder, config),
        check_weights(folder, config, meminfo),
        *check_names(folder, config),
        check_cpu(config, text),
    ]
    known = all(c.ok is not False for c in checks if c.name in ("architecture", "layer ids"))
    if not known:
        return checks, ""
    triple = default_boundaries(n_blocks) if n_blocks >= MIN_BLOCKS else None
    table = round_trip_text(round_trip(n_blocks, architecture, triple))
    return checks, f"Its layer ids:\n{table}"


def _unreadable_config(name: str, folder: Path, error: Exception) -> Check:
    reason = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error).splitlines()[0]
    command = "a folder that save_pretrained wrote"
    if name == "embedded":
        command = f"{_python()} -m eyas doctor --target embedded"
    return Check("config.json", False, f"{folder.name}: {reason}", command)


def _check_config(folder: Path, architecture: str, text: dict) -> Check:
    """Report the sizes of a target."""
    keys = {
        "hidden size": "hidden_size",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    sizes = ", ".join(f"{word} {text[key]:,}" for word, key in keys.items() if key in text)
    n_blocks = text["num_hidden_layers"]
    return Check("config.json", True, f"{folder.name}: {architecture}, {n_blocks} blocks, {sizes}")


def check_family(architecture: str) -> list[Check]:
    """Check what the installed SGLang can do with this architecture.

    Does SGLang have it? Can the capture plugin hook its blocks? Can EAGLE3 be fed from it? Are its
    layer ids known?
    """
    known = family(architecture)
    engine = SGLANG.replace("sglang", "SGLang")
    if known is None:
        return [_unknown_architecture(architecture, engine)]
    stack = f"{known.stack or 'nothing'} of {known.file}.py: no blocks with a stage boundary"
    stack += " whose forward names hidden_states and forward_batch"
    if known.block:
        stack = f"{known.stack} of {known.file}.py, blocks {known.block}"
    setter = f"no {SETTER}: EAGLE3 cannot be fed from it"
    if known.setter:
        setter = f"{SETTER} of {known.setter}"
    return [
        Check("architecture", True, f"in {engine}: models/{known.file}.py"),
        Check(
            "capture",
            known.block is not None,
            stack,
            "patches/README.md: what the capture plugin hooks; another target",
        ),
        Check(
            "EAGLE3",
            known.setter is not None,
            setter,
            "another target: this one can be captured and studied,"
            f" not served with a drafter by {engine}",
        ),
        _check_layer_ids(architecture, engine),
    ]


def _unknown_architecture(architecture: str, engine: str) -> Check:
    command = "another target, or python -m eyas doctor where SGLang is missing"
    if not architectures():
        return Check("architecture", False, "SGLang is not installed here", command)
    near = difflib.get_close_matches(architecture, architectures(), 3)
    detail = f"{architecture} is none of the {len(architectures())} of {engine}"
    if near:
        detail += f"; near: {', '.join(near)}"
    return Check("architecture", False, detail, command)


def _check_layer_ids(architecture: str, engine: str) -> Check:
    try:
        return Check("layer ids", True, f"rule {rule(SGLANG, architecture)!r} of {engine}")
    except EyasError as error:
        command = "add it to FAMILIES of lib/eyas/models/layer_ids.py:"
        command += " the tests compare it with SGLang's own method"
        return Check("layer ids", False, error.found, command)


def check_boundaries(architecture: str, n_blocks: int) -> list[Check]:
    """Check that there are enough blocks for 2, N//2, N-3, and report their ids in SGLang."""
    name = "default boundaries"
    if n_blocks < MIN_BLOCKS:
        detail = f"none with {n_blocks} blocks: 2, N//2, N-3 fall together;"
        return [Check(name, None, f"{detail} give -p boundaries B,B,B")]
    triple = default_boundaries(n_blocks)
    detail = ", ".join(map(str, triple))
    try:
        ids = ", ".join(map(str, engine_ids(triple, architecture, n_blocks)))
        detail += f", ids {ids} for {SGLANG.replace('sglang', 'SGLang')}"
    except EyasError:
        pass  # `_check_layer_ids` reports it
    return [Check(name, True, f"{detail}; the last is {n_blocks}")]


def check_dtype(text: dict, config: dict) -> Check:
    """Check the dtype in which the server computes, since states are stored in it.

    Quantised weights are the server's matter.
    """
    named = (
        text.get("dtype"),
        text.get("torch_dtype"),
        config.get("dtype"),
        config.get("torch_dtype"),
    )
    dtype = next(filter(None, named), None)
    detail = dtype or "not given"
    quantised = _quantised(config, text)
    if quantised:
        detail += f", weights quantised ({quantised}):"
        detail += f" states come as the server computes them, {_start(quantised)}"
    if dtype in ("bfloat16", "float32"):
        return Check("dtype", True, detail)
    return Check("dtype", None, f"{detail}; serve it with -p dtype bfloat16 or float32")


def _start(quantised: str) -> str:
    """Return in words what a drafter of a quantised target starts from."""
    from eyas.models.dense_weights import READ_METHODS

    if quantised in READ_METHODS:
        return "the drafter starts from the dequantised weights"
    return "the drafter can't start from these: train with -p initial_weights random"


def check_code(config: dict) -> Check:
    """Report whether the model is Python code of its own folder."""
    name = "code of its own"
    if config.get("auto_map"):
        return Check(name, None, "yes (auto_map): read it, then -p trust_remote_code true")
    return Check(name, True, "none")


def check_processor(folder: Path, config: dict) -> list[Check]:
    """Check the files of the processor that SGLang loads for a model that also sees or hears.

    SGLang calls transformers' AutoProcessor for these architectures and ends if it cannot. A
    config.json with "language_model_only": true goes without. Nothing is run: files are looked for.
    """
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in multimodal_architectures():
        return []
    if config.get("language_model_only"):
        return [Check("processor", None, "language_model_only in config.json: SGLang loads none")]
    if [path.name for path in folder.iterdir()] == ["config.json"]:
        return [Check("processor", None, "not looked for: config.json is alone")]
    settings = [name for name in PROCESSOR_FILES if (folder / name).is_file()]
    missing = [] if settings else ["preprocessor_config.json"]
    for name in settings:
        missing += _missing_code(folder, read_json(folder / name).get("auto_map") or {})
    command = (
        'copy the rest of the model\'s folder; or add "language_model_only": true to config.json,'
        " which serves text only"
    )
    if missing:
        needed = ", ".join(dict.fromkeys(missing))
        detail = f"SGLang needs it for {architecture}, and the folder lacks {needed}"
        return [Check("processor", False, detail, command)]
    return [Check("processor", True, f"{', '.join(settings)} for SGLang's processor")]


def _missing_code(folder: Path, auto_map: dict) -> list[str]:
    """Return the Python files that `auto_map` names and the folder lacks, with what they import."""
    classes = [name for value in auto_map.values() for name in _as_list(value) if name]
    waiting = [name.split("--")[-1].split(".")[0] for name in classes]
    seen = set()
    missing = []
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        path = folder / f"{module}.py"
        if not path.is_file():
            missing.append(path.name)
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        waiting += re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE)
    return missing


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def check_tokenizer(folder: Path, vocab_size: int) -> list[Check]:
    """Check that the tokenizer loads, that its ids fit the model, and its chat template."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")
    if not any((folder / name).is_file() for name in files):
        return [Check("tokenizer", None, "none in the folder: not checked")]
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and (own := read_json(settings).get("auto_map")):
        if missing := _missing_code(folder, own):
            detail = f"its code is not in the folder: {', '.join(missing)}"
            return [Check("tokenizer", False, detail, "copy the rest of the model's folder")]
        return [Check("tokenizer", None, "has code of its own, which is not run here")]
    try:
        from transformers import AutoTokenizer

        import eyas.prompts.prompt_set  # noqa: F401  needs packages too
    except ImportError as error:
        return [Check("tokenizer", None, f"not checked: {error}")]
    again = (
        "copy the tokenizer's files of the model, chat_template.jinja among them, into its folder"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a tokenizer's files hold
        return [Check("tokenizer", False, f"can't be loaded: {str(error).splitlines()[0]}", again)]
    fits = not vocab_size or len(tokenizer) <= vocab_size
    detail = f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens of {vocab_size:,}"
    return [Check("tokenizer", fits, detail, again), *check_template(tokenizer, again)]


@dataclass(frozen=True)
class Supervised:
    """Hold what the chat template supervises of a conversation.

    tokens: how many tokens, in words. wrong: the supervised text if it is not the answers.
    last_only: earlier answers are rewritten, so that only the last one is supervised.
    """

    tokens: str
    wrong: str
    last_only: bool


def check_template(tokenizer, again: str) -> list[Check]:
    """Check that the chat template supervises the answers, and nothing else.

    Conversations of one turn and of two are encoded as extraction does it. If the template refuses
    plain answers because it thinks, answers with thoughts are tried, and plain answers with
    thinking switched off.
    """
    original = tokenizer.chat_template
    try:
        try:
            ways = {"": _supervised_by_turns(tokenizer)}
        except EyasError as error:
            ways = _supervised_when_thinking(tokenizer)
            if not ways:
                command = error.next_command or again
                return [Check("chat template", False, error.found, command)]
    finally:
        tokenizer.chat_template = original
    for one_turn, two_turns in ways.values():
        wrong = one_turn.wrong or two_turns.wrong
        if wrong:
            detail = f"what it supervises of an answer: {wrong!r}"
            return [Check("chat template", False, detail, again)]
    return _template_checks(ways)


def _supervised_by_turns(
    tokenizer, thoughts: str = "", kwargs: str = ""
) -> tuple[Supervised, Supervised]:
    """Return what is supervised of one turn and of two. Raise EyasError if the template refuses.

    The tokenizer's chat template is changed if `kwargs` are given.
    """
    from eyas.models.target import with_kwargs

    if kwargs:
        tokenizer.chat_template = with_kwargs(tokenizer.chat_template, kwargs)
    return _supervised(tokenizer, 1, thoughts), _supervised(tokenizer, 2, thoughts)


def _supervised(tokenizer, turns: int, thoughts: str) -> Supervised:
    """Encode a conversation of one turn or of two as extraction does it."""
    from eyas.prompts.chat_template import encode
    from eyas.prompts.prompt_set import Conversation

    texts = ("What is 2 + 2?", "It is 4.", "And 3 + 3?", "6, of course.")
    messages = []
    for question, answer in zip(texts[: 2 * turns : 2], texts[1 : 2 * turns : 2]):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": thoughts + answer})
    conversation = Conversation("doctor", "chat", "doctor", "train", messages)
    sample = encode(conversation, tokenizer, 4096)
    text = tokenizer.decode(sample.input_ids[sample.loss_mask].tolist())
    last_only = bool(sample.warnings)
    answers = texts[1 : 2 * turns : 2]
    if last_only:
        answers = answers[-1:]
    right = all((piece in text) == (piece in answers) for piece in texts)
    tokens = f"{int(sample.loss_mask.sum())} of {len(sample.input_ids)} tokens"
    return Supervised(tokens, "" if right else text, last_only)


def _supervised_when_thinking(tokenizer) -> dict[str, tuple[Supervised, Supervised]]:
    """Return {way in words: what is supervised}, of the ways that a thinking template accepts."""
    from eyas.prompts.chat_template import thinking_switch

    original = tokenizer.chat_template
    attempts = [("answers with thoughts", "<think>\nLet me add.\n</think>\n\n", "")]
    switch = thinking_switch(tokenizer) if isinstance(original, str) else ""
    if switch:
        off = json.dumps({switch: False})
        attempts.append((f"without with -p chat_template_kwargs '{off}'", "", off))
    ways = {}
    for name, thoughts, kwargs in attempts:
        tokenizer.chat_template = original
        with contextlib.suppress(EyasError):
            ways[name] = _supervised_by_turns(tokenizer, thoughts, kwargs)
    return ways


def _template_checks(ways: dict[str, tuple[Supervised, Supervised]]) -> list[Check]:
    """Return the checks of a template that supervises the right text in each of these ways."""
    rewriting = [name for name, (_, two_turns) in ways.items() if two_turns.last_only]
    if "" in ways:
        one_turn, two_turns = ways[""]
        detail = f"{two_turns.tokens} of two turns supervised"
        if rewriting:
            detail = f"{one_turn.tokens} of one turn supervised"
    else:
        detail = "thinks: " + ", ".join(
            f"{name} ({one_turn.tokens} of one turn supervised)"
            for name, (one_turn, _) in ways.items()
        )
    checks = [Check("chat template", True, detail)]
    if rewriting:
        which = "" if len(rewriting) == len(ways) else f"{', '.join(rewriting)}: "
        checks.append(
            Check(
                "several answers",
                None,
                f"{which}the template rewrites earlier ones when more follows,"
                " the last is supervised alone",
            )
        )
    return checks


def check_weights(folder: Path, config: dict, meminfo: str) -> Check:
    """Check that the weight files exist and fit into this machine's memory.

    `meminfo` is the text of /proc/meminfo. On a GPU, the GPU's memory counts instead.
    """
    index = folder / "model.safetensors.index.json"
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    wanted = set(read_json(index)["weight_map"].values()) if index.is_file() else set(sizes)
    if not wanted:
        detail = "none in safetensors here: the other checks use config.json alone"
        return Check("weights", None, detail)
    if missing := sorted(wanted - set(sizes)):
        return Check(
            "weights",
            False,
            f"{len(missing)} of {len(wanted)} files missing: {_few(missing)}",
            "copy the rest of the model's folder",
        )
    available = _meminfo_bytes(meminfo)["MemAvailable"]
    size = sum(sizes.values())
    detail = f"{bytes_text(size)} in {len(sizes)} files;"
    detail += f" {bytes_text(available)} of memory available here"
    if size < available:
        return Check("weights", True, detail)
    return Check("weights", None, f"{detail}: too large to be served by this machine's CPU")


def _meminfo_bytes(meminfo: str) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    fields = {}
    for line in meminfo.splitlines():
        name, rest = line.split(":", 1)
        fields[name] = 1024 * int(rest.split()[0])
    return fields


def check_names(folder: Path, config: dict) -> list[Check]:
    """Check that the safetensors files hold every weight of config.json, in its shape.

    Return no check if the folder has no such files.
    """
    if not any(folder.glob("*.safetensors")):
        return []
    try:
        from eyas.models.weights import COPY_COMMAND, compare, few
    except ImportError as error:
        return [Check("weights' names", None, f"not compared with config.json: {error}")]
    try:
        comparison = compare(folder, config)
    except ImportError as error:
        return [Check("weights' names", None, f"not compared with config.json: {error}")]
    except EyasError as error:
        return [Check("weights' names", False, error.found, error.next_command)]
    if comparison.faults:
        return [
            Check(
                "weights' names",
                False,
                "; ".join(comparison.faults),
                f"{COPY_COMMAND}; expected: {comparison.expected}",
            )
        ]
    if comparison.not_made:
        return [
            Check("weights' names", None, f"not compared with config.json: {comparison.not_made}")
        ]
    head = "the head is the embedding" if comparison.tied else "the head is a weight of its own"
    checks = [
        Check("weights' names", True, f"every weight of {comparison.model}, in its shape; {head}")
    ]
    if comparison.unused:
        detail = f"{len(comparison.unused):,} that {comparison.model} has no place for:"
        checks.append(Check("unused weights", None, f"{detail} {few(comparison.unused)}"))
    if comparison.twice:
        detail = f"{len(comparison.twice):,} in several files, the last file counts:"
        checks.append(Check("weights twice", None, f"{detail} {few(comparison.twice)}"))
    return checks


def check_cpu(config: dict, text: dict) -> Check:
    """Check that the plain CPU platform has kernels for the target.

    `ok` is None, with the reason, where only a GPU serves it.
    """
    reasons = []
    quantised = _quantised(config, text)
    if quantised:
        reasons.append(f"quantised weights ({quantised})")
    kinds = set(text.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if kinds:
        reasons.append(f"layers of type {', '.join(sorted(kinds))}")
    if text.get("index_topk"):
        reasons.append("sparse attention (index_topk)")
    if reasons:
        return Check("device cpu", None, f"not for {' and '.join(reasons)}: -p device cuda")
    kind = "latent attention (MLA)" if text.get("kv_lora_rank") else "attention"
    return Check("device cpu", True, f"torch_native: {kind}, plain torch")


def _quantised(config: dict, text: dict) -> str:
    """Return the method of quantised weights; empty if they are not quantised."""
    settings = text.get("quantization_config") or config.get("quantization_config") or {}
    return settings.get("quant_method", "") if isinstance(settings, dict) else str(settings)


def lock_path() -> Path:
    """Return the lock file that this environment follows.

    It is gpu.txt where SGLang's GPU kernels are installed, otherwise cpu.txt.
    """
    return ROOT / "requirements" / ("gpu.txt" if _installed("sglang-kernel") else "cpu.txt")


def check_python(version: tuple[int, int, int]) -> Check:
    """Check that this is Python 3.11, and report an interpreter outside a virtual environment."""
    detail = ".".join(map(str, version))
    if sys.prefix == sys.base_prefix:
        detail += f", {sys.prefix}"
    return Check(
        "Python",
        version[:2] == (3, 11),
        detail,
        "install Python 3.11, then make clean doctor PYTHON=python3.11",
    )


def read_lock(path: Path) -> dict[str, str]:
    """Return {package: version} of a lock file; names are normalised as in PEP 503."""
    packages = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        requirement = line.split("#")[0].strip()
        if requirement:
            name, version = requirement.split("==")
            packages[re.sub(r"[-_.]+", "-", name).lower()] = version
    return packages


def check_packages(lock: Path) -> Check:
    """Check that the installed packages are those of a lock file."""
    wanted = read_lock(lock)
    installed = {name: _installed(name) for name in wanted}
    missing = [name for name, version in installed.items() if version is None]
    other = [
        f"{name} {installed[name]} (locked: {version})"
        for name, version in wanted.items()
        if installed[name] not in (None, version)
    ]
    n_right = len(wanted) - len(missing) - len(other)
    detail = f"{n_right} of {len(wanted)} as in requirements/{lock.name}"
    if missing:
        detail += f"; missing: {_few(missing)}"
    if other:
        detail += f"; other version: {_few(other)}"
    options = "--no-deps -r requirements/cpu.txt"
    if lock.name != "cpu.txt":
        options = "-r requirements/gpu.txt"
    command = f"{_python()} -m pip install {options}"
    return Check("packages", not missing and not other, detail, command)


def check_plugins(needed: tuple[str, ...]) -> list[Check]:
    """Check each plugin: its entry point, then its own `check()`.

    Each `check()` runs in a process of its own, all at the same time.
    """
    checks = {}
    processes = {}
    for package, group in PLUGINS.items():
        name = f"plugin {package}"
        folder = f"patches/{package.removeprefix('eyas_')}"
        entry_points = importlib.metadata.entry_points(group=group)
        if package not in {point.name for point in entry_points}:
            checks[package] = Check(
                name,
                False if package in needed else None,
                f"no entry point {package} in {group}",
                f"{_python()} -m pip install --no-deps --no-build-isolation -e {folder}",
            )
        elif package not in needed:
            checks[package] = Check(name, None, "installed; not needed on a GPU")
        else:
            processes[package] = _start_check(package, needed)
    for package, process in processes.items():
        checks[package] = _plugin_answer(package, process)
    return [checks[package] for package in PLUGINS]


def _start_check(package: str, needed: tuple[str, ...]) -> subprocess.Popen:
    """Start a process that prints the result of a plugin's `check()` as JSON."""
    environment = os.environ | {"SGLANG_PLUGINS": "eyas_capture"}
    if "eyas_cpu" in needed:
        environment["SGLANG_PLATFORM"] = "eyas_cpu"
    code = f"import json, {package}; print(json.dumps({package}.check()))"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _plugin_answer(package: str, process: subprocess.Popen) -> Check:
    """Wait for the check of a plugin and return its result."""
    name = f"plugin {package}"
    command = "see patches/README.md: which SGLang versions it is made for, how to check it"
    try:
        out, err = process.communicate(timeout=PLUGIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Check(name, False, f"no answer in {PLUGIN_TIMEOUT_S:.0f} s", command)
    if process.returncode:
        last_line = (err.strip() or "no output").splitlines()[-1]
        detail = f"its check ended with {process.returncode}: {last_line}"
        return Check(name, False, detail, command)
    answer = json.loads(out.strip().splitlines()[-1])
    return Check(name, answer["ok"], f"{answer['version']}: {answer['detail']}", command)


def check_kernelspec() -> Check:
    """Check that the notebooks' kernel is in this environment, not only in the user's home."""
    path = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
    return Check(
        "Jupyter kernel",
        path.is_file(),
        "python3" if path.is_file() else "no python3 in this environment",
        f"{_python()} -m ipykernel install --sys-prefix",
    )


def check_disk(name: str, folder: Path, need_bytes: int, command: str) -> Check:
    """Check that a folder is writable and that its disk has `need_bytes` free."""
    existing = folder.absolute()
    while not existing.exists():  # the data folder is made at first use
        existing = existing.parent
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    if not os.access(existing, os.W_OK):
        return Check(name, False, f"{shown} can't be written", command)
    free = shutil.disk_usage(existing).free
    return Check(
        name,
        free >= need_bytes,
        f"{shown}: {bytes_text(free)} free, the demo takes up to {bytes_text(need_bytes)}",
        command,
    )


def check_memory(meminfo: str) -> Check:
    """Check that enough memory is available. `meminfo` is the text of /proc/meminfo."""
    fields = _meminfo_bytes(meminfo)
    available = fields["MemAvailable"]
    detail = (
        f"{bytes_text(available)} available of {bytes_text(fields['MemTotal'])},"
        f" the demo takes up to {bytes_text(MEMORY_BYTES)}"
    )
    return Check(
        "memory",
        available >= MEMORY_BYTES,
        detail,
        "end other programs, or set max_total_tok and batch_tok of the profile lower",
    )


def check_target() -> Check:
    """Check the embedded target; it is not converted here."""
    try:
        from eyas.models.target import embedded_state
    except ImportError as error:
        return Check(
            "embedded target",
            False,
            f"not checked: {error}",
            "install the packages first, as above",
        )
    try:
        ok, detail = embedded_state()
    except EyasError as error:
        return Check("embedded target", False, error.found, error.next_command)
    return Check("embedded target", ok, detail, f"{_python()} -m eyas doctor --target embedded")


def check_browser() -> Check:
    """Report whether a browser is installed, which only the test of the reports needs."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        detail = "no chromium; only the test of the reports needs it, they open in any browser"
        return Check("browser", None, detail)
    return Check("browser", None, f"{Path(path).name}; only to test the reports")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> str:
    return ".venv/bin/python" if Path(sys.prefix) == ROOT / ".venv" else "python"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
