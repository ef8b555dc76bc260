"""Is everything here that Eyas needs, and what to type where it is not: `python -m eyas doctor`, one screen.

`python -m eyas doctor --target FOLDER` asks instead whether a target is supported, step by step of the road; its config.json alone is enough.

The two plugins are not only looked for: each is applied in a process of its own, since SGLang merely logs a hook that fails.
Only the standard library is imported here, so that it also works where packages are missing.
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
from eyas.models.sglang_source import SETTER, architectures, family
from eyas.progress import bytes_text

GIB = 2**30
PLUGINS = {
    "eyas_capture": "sglang.srt.plugins",
    "eyas_cpu": "sglang.srt.platforms",
}  # package -> entry-point group
PLUGIN_TIMEOUT_S = 600.0  # it imports the scheduler of SGLang: 10 s on a quiet machine, minutes on one that is busy elsewhere
DATA_BYTES, TEMPORARY_BYTES, MEMORY_BYTES = (
    3 * GIB,
    GIB // 2,
    4 * GIB,
)  # what the demo takes, rounded up
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Check:
    """`ok` is None for what is only said or not needed; `command` is what to type when it is False."""

    name: str
    ok: bool | None
    detail: str
    command: str = ""


def doctor() -> list[Check]:
    """Every check, in the order of the screen."""
    gpu = lock_path().name == "gpu.txt"
    return [
        check_python(sys.version_info[:3]),
        check_packages(lock_path()),
        Check(
            "SGLang",
            _installed("sglang") is not None,
            f"{_installed('sglang')}, {'in full, with GPU kernels' if gpu else 'without GPU kernels: device cpu'}"
            if _installed("sglang")
            else "not installed",
            "rm -f .venv/.ready && make doctor",
        ),
        *check_plugins(needed=("eyas_capture",) if gpu else tuple(PLUGINS)),
        check_kernelspec(),
        check_disk(
            "data folder", data_dir(), DATA_BYTES, "set EYAS_DATA to a folder on a larger disk"
        ),
        check_disk(
            "temporary folder",
            Path(tempfile.gettempdir()),
            TEMPORARY_BYTES,
            "set TMPDIR to a folder on a larger disk",
        ),
        check_memory(Path("/proc/meminfo").read_text(encoding="utf-8")),
        Check(
            "cores",
            None,
            f"{len(os.sched_getaffinity(0))} usable; settings `threads` of a profile says how many are used",
        ),
        check_target(),
        check_browser(),
    ]


def screen(
    checks: list[Check], well: str = "Everything that is needed is here; next: make demo"
) -> str:
    """One line a check, then the command for each thing that is wrong."""
    marks = {True: "ok", False: "WRONG", None: "-"}
    lines = [f"Eyas {__version__}", *(f"  {marks[c.ok]:6}{c.name:21}{c.detail}" for c in checks)]
    wrong = [c for c in checks if c.ok is False]
    if not wrong:
        return "\n".join([*lines, well])
    return "\n".join([*lines, "What to do:", *(f"  {c.name}: {c.command}" for c in wrong)])


def target_doctor(name: str) -> tuple[list[Check], str]:
    """Every check of a target, 'embedded' or a Hugging Face folder (or one with a config.json alone), and the table of layer ids where its family is known."""
    folder = (
        data_dir() / "targets" / "SmolLM2-135M-Instruct"
        if name == "embedded"
        else Path(name).expanduser()
    )
    try:
        config = read_json(folder / "config.json")
        text = config.get("text_config", config)
        n_blocks, architecture = text["num_hidden_layers"], config["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        return [
            Check(
                "config.json",
                False,
                f"{folder.name}: {what}",
                f"{_python()} -m eyas target"
                if name == "embedded"
                else "a folder that save_pretrained wrote",
            )
        ], ""
    sizes = ", ".join(
        f"{word} {text[key]:,}"
        for word, key in (
            ("hidden size", "hidden_size"),
            ("vocabulary", "vocab_size"),
            ("context", "max_position_embeddings"),
        )
        if key in text
    )
    checks = [
        Check("config.json", True, f"{folder.name}: {architecture}, {n_blocks} blocks, {sizes}"),
        *check_family(architecture),
        *check_boundaries(architecture, n_blocks),
        check_dtype(text, config),
        check_code(config),
        *check_tokenizer(folder, text.get("vocab_size", 0)),
        check_weights(folder, config, Path("/proc/meminfo").read_text(encoding="utf-8")),
        *check_names(folder, config),
        check_cpu(config, text),
    ]
    known = all(c.ok is not False for c in checks if c.name in ("architecture", "layer ids"))
    triple = default_boundaries(n_blocks) if n_blocks >= MIN_BLOCKS else None
    return checks, "Its layer ids:\n" + round_trip_text(
        round_trip(n_blocks, architecture, triple)
    ) if known else ""


def check_family(architecture: str) -> list[Check]:
    """Is it in SGLang as installed, can the capture plugin hook its blocks, can EAGLE3 feed from it, are its layer ids known?"""
    found, engine = family(architecture), SGLANG.replace("sglang", "SGLang")
    if found is None:
        near = difflib.get_close_matches(architecture, architectures(), 3)
        detail = (
            f"{architecture} is none of the {len(architectures())} of {engine}"
            + f"; near: {', '.join(near)}" * bool(near)
        )
        return [
            Check(
                "architecture",
                False,
                detail if architectures() else "no SGLang here to look in",
                "another target, or python -m eyas doctor where SGLang is missing",
            )
        ]
    stack = (
        f"{found.stack} of {found.file}.py, blocks {found.block}"
        if found.block
        else f"{found.stack or 'nothing'} of {found.file}.py: no blocks with a stage boundary whose forward names hidden_states and forward_batch"
    )
    setter = (
        f"{SETTER} of {found.setter}"
        if found.setter
        else f"no {SETTER}: EAGLE3 cannot feed from it"
    )
    checks = [
        Check("architecture", True, f"in {engine}: models/{found.file}.py"),
        Check(
            "capture",
            found.block is not None,
            stack,
            "patches/README.md: what the capture plugin hooks; another target",
        ),
        Check(
            "EAGLE3",
            found.setter is not None,
            setter,
            f"another target: this one can be captured and studied, not served with a drafter by {engine}",
        ),
    ]
    try:
        checks.append(Check("layer ids", True, f"rule {rule(SGLANG, architecture)!r} of {engine}"))
    except EyasError as error:
        checks.append(
            Check(
                "layer ids",
                False,
                error.found,
                "add it to FAMILIES of lib/eyas/models/layer_ids.py: the tests compare it with SGLang's own method",
            )
        )
    return checks


def check_boundaries(architecture: str, n_blocks: int) -> list[Check]:
    """Are there blocks enough for 2, N//2, N-3, and what are they to SGLang?"""
    if n_blocks < MIN_BLOCKS:
        return [
            Check(
                "default boundaries",
                None,
                f"none with {n_blocks} blocks: 2, N//2, N-3 fall together; give -p boundaries B,B,B",
            )
        ]
    triple = default_boundaries(n_blocks)
    try:
        ids = f", ids {', '.join(map(str, engine_ids(triple, architecture, n_blocks)))} for {SGLANG.replace('sglang', 'SGLang')}"
    except EyasError:
        ids = ""
    return [
        Check(
            "default boundaries",
            True,
            f"{', '.join(map(str, triple))}{ids}; the last is {n_blocks}",
        )
    ]


def check_dtype(text: dict, config: dict) -> Check:
    """States are kept in the dtype that the server computes in; quantised weights are the server's business."""
    dtype, quantised = (
        text.get("dtype")
        or text.get("torch_dtype")
        or config.get("dtype")
        or config.get("torch_dtype"),
        _quantised(config, text),
    )
    detail = (
        f"{dtype or 'not said'}"
        + f", weights quantised ({quantised}): states come as the server computes them, {_start(quantised)}"
        * bool(quantised)
    )
    return Check(
        "dtype",
        True if dtype in ("bfloat16", "float32") else None,
        detail
        if dtype in ("bfloat16", "float32")
        else f"{detail}; serve it with -p dtype bfloat16 or float32",
    )


def _start(quantised: str) -> str:
    """Return in words what a drafter of a quantised target starts from."""
    from eyas.models.dense_weights import READ_METHODS

    if quantised in READ_METHODS:
        return "the drafter starts from the dequantised weights"
    return "the drafter can't start from these: train with -p initial_weights random"


def check_code(config: dict) -> Check:
    own = config.get("auto_map")
    return Check(
        "code of its own",
        None if own else True,
        "yes (auto_map): read it, then -p trust_remote_code true" if own else "none",
    )


def check_tokenizer(folder: Path, vocab_size: int) -> list[Check]:
    """Can it be loaded, are its ids the model's, and what of a conversation does its chat template supervise?"""
    if not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")
    ):
        return [Check("tokenizer", None, "none in the folder: not looked at")]
    if (folder / "tokenizer_config.json").is_file() and "auto_map" in read_json(
        folder / "tokenizer_config.json"
    ):
        return [Check("tokenizer", None, "has code of its own, which is not run here")]
    try:
        from transformers import AutoTokenizer

        import eyas.prompts.prompt_set  # noqa: F401  needs packages too
    except ImportError as error:
        return [Check("tokenizer", None, f"not looked at: {error}")]
    again = (
        "copy the tokenizer's files of the model, chat_template.jinja among them, into its folder"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a tokenizer's files hold
        return [Check("tokenizer", False, f"can't be loaded: {str(error).splitlines()[0]}", again)]
    fits = not vocab_size or len(tokenizer) <= vocab_size
    return [
        Check(
            "tokenizer",
            fits,
            f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens of {vocab_size:,}",
            again,
        ),
        *check_template(tokenizer, again),
    ]


def check_template(tokenizer, again: str) -> list[Check]:
    """A conversation of one turn and one of two through the chat template, as extraction does it: are the answers supervised, and nothing else?

    A template that thinks is asked with thoughts in the answers, and with its thinking switched off.
    """
    from eyas.models.target import with_kwargs
    from eyas.prompts.chat_template import encode, thinking_switch
    from eyas.prompts.prompt_set import Conversation

    own, texts = (
        tokenizer.chat_template,
        ("What is 2 + 2?", "It is 4.", "And 3 + 3?", "6, of course."),
    )

    def supervised(turns: int, thoughts: str = "", kwargs: str = "") -> tuple[str, str, bool]:
        """(how much is supervised, what is where that is wrong, whether the last answer is alone)"""
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": thoughts * (i % 2) + text}
            for i, text in enumerate(texts[: 2 * turns])
        ]
        tokenizer.chat_template = with_kwargs(own, kwargs) if kwargs else own
        sample = encode(
            Conversation("doctor", "chat", "doctor", "train", messages), tokenizer, 4096
        )
        said, alone = (
            tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()),
            bool(sample.warnings),
        )
        answers = texts[2 * turns - 1 : 2 * turns] if alone else texts[1 : 2 * turns : 2]
        right = all((text in said) == (text in answers) for text in texts)
        return (
            f"{int(sample.loss_mask.sum())} of {len(sample.input_ids)} tokens",
            "" if right else said,
            alone,
        )

    try:
        ways = {"": (supervised(1), supervised(2))}
    except EyasError as error:
        ways, refused, switch = (
            {},
            error,
            thinking_switch(tokenizer) if isinstance(own, str) else "",
        )
        off = json.dumps({switch: False})
        for name, thoughts, kwargs in [
            ("answers with thoughts", "<think>\nLet me add.\n</think>\n\n", "")
        ] + [(f"without with -p chat_template_kwargs '{off}'", "", off)] * bool(switch):
            with contextlib.suppress(EyasError):
                ways[name] = supervised(1, thoughts, kwargs), supervised(2, thoughts, kwargs)
        if not ways:
            return [Check("chat template", False, refused.found, refused.next_command or again)]
    finally:
        tokenizer.chat_template = own
    if wrong := next((said for looks in ways.values() for _, said, _ in looks if said), ""):
        return [Check("chat template", False, f"what it supervises of an answer: {wrong!r}", again)]
    alone = [name for name, (_, two) in ways.items() if two[2]]
    if "" in ways:
        one, two = ways[""]
        checks = [
            Check(
                "chat template",
                True,
                f"{one[0]} of one turn supervised"
                if alone
                else f"{two[0]} of two turns supervised",
            )
        ]
    else:
        checks = [
            Check(
                "chat template",
                True,
                "thinks: "
                + ", ".join(
                    f"{name} ({one[0]} of one turn supervised)" for name, (one, _) in ways.items()
                ),
            )
        ]
    which = "" if len(alone) == len(ways) else f"{', '.join(alone)}: "
    return checks + [
        Check(
            "several answers",
            None,
            f"{which}the template rewrites earlier ones when more follows, the last is supervised alone",
        )
    ] * bool(alone)


def check_weights(folder: Path, config: dict, meminfo: str) -> Check:
    """Are they there, and do they fit into this machine's memory? (On a GPU it is the GPU's that counts.)"""
    index = folder / "model.safetensors.index.json"
    files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    wanted = set(read_json(index)["weight_map"].values()) if index.is_file() else set(files)
    available = (
        1024
        * {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines()}[
            "MemAvailable"
        ]
    )
    if not wanted:
        return Check(
            "weights", None, "none in safetensors here: the rest is said of config.json alone"
        )
    if missing := sorted(wanted - set(files)):
        return Check(
            "weights",
            False,
            f"{len(missing)} of {len(wanted)} files missing: {_few(missing)}",
            "copy the rest of the model's folder",
        )
    size = sum(files.values())
    detail = f"{bytes_text(size)} in {len(files)} files; {bytes_text(available)} of memory available here"
    return Check(
        "weights",
        size < available or None,
        detail + ("" if size < available else ": too large to be served by this machine's CPU"),
    )


def check_names(folder: Path, config: dict) -> list[Check]:
    """Do the safetensors files hold every weight that config.json asks for, in its shape? Nothing is said where there are none."""
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
        checks.append(
            Check(
                "unused weights",
                None,
                f"{len(comparison.unused):,} that {comparison.model} has no place for: {few(comparison.unused)}",
            )
        )
    if comparison.twice:
        checks.append(
            Check(
                "weights twice",
                None,
                f"{len(comparison.twice):,} in several files, the last file counts: {few(comparison.twice)}",
            )
        )
    return checks


def check_cpu(config: dict, text: dict) -> Check:
    """What the plain CPU platform has kernels for; None with the reason where only a GPU serves it."""
    quantised, kinds = (
        _quantised(config, text),
        {*(text.get("layer_types") or [])} - {"full_attention", "sliding_attention"},
    )
    reasons = [f"quantised weights ({quantised})"] * bool(quantised) + [
        f"layers of type {', '.join(sorted(kinds))}"
    ] * bool(kinds)
    reasons += ["sparse attention (index_topk)"] * bool(text.get("index_topk"))
    kind = "latent attention (MLA)" if text.get("kv_lora_rank") else "attention"
    return Check(
        "device cpu",
        None if reasons else True,
        f"not for {' and '.join(reasons)}: -p device cuda"
        if reasons
        else f"torch_native: {kind}, plain torch",
    )


def _quantised(config: dict, text: dict) -> str:
    found = text.get("quantization_config") or config.get("quantization_config") or {}
    return found.get("quant_method", "") if isinstance(found, dict) else str(found)


def lock_path() -> Path:
    """The list that this environment follows: gpu.txt where SGLang's GPU kernels are installed."""
    return ROOT / "requirements" / ("gpu.txt" if _installed("sglang-kernel") else "cpu.txt")


def check_python(version: tuple[int, int, int]) -> Check:
    return Check(
        "Python",
        version[:2] == (3, 11),
        ".".join(map(str, version)) + f", {sys.prefix}" * (sys.prefix == sys.base_prefix),
        "install Python 3.11, then make clean doctor PYTHON=python3.11",
    )


def read_lock(path: Path) -> dict[str, str]:
    """Package (its name normalised as in PEP 503) -> version, from lines `name==version`."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in (line.split("==") for line in lines if line)
    }


def check_packages(lock: Path) -> Check:
    wanted = read_lock(lock)
    missing = [name for name in wanted if _installed(name) is None]
    other = [
        f"{name} {_installed(name)} (locked: {version})"
        for name, version in wanted.items()
        if name not in missing and _installed(name) != version
    ]
    detail = (
        f"{len(wanted) - len(missing) - len(other)} of {len(wanted)} as in requirements/{lock.name}"
    )
    detail += f"; missing: {_few(missing)}" * bool(
        missing
    ) + f"; other version: {_few(other)}" * bool(other)
    if lock.name == "cpu.txt":
        return Check(
            "packages",
            not missing and not other,
            detail,
            f"{_python()} -m pip install --no-deps -r requirements/cpu.txt",
        )
    return Check(
        "packages",
        not missing and not other,
        detail,
        f"{_python()} -m pip install -r requirements/gpu.txt",
    )


def check_plugins(needed: tuple[str, ...]) -> list[Check]:
    """A check per plugin: found by its entry point, then `check()` of the package in a process of its own (both run at once)."""
    processes, checks = {}, {}
    for package, group in PLUGINS.items():
        name, command = (
            f"plugin {package}",
            f"{_python()} -m pip install --no-deps --no-build-isolation -e patches/{package.removeprefix('eyas_')}",
        )
        if package not in {point.name for point in importlib.metadata.entry_points(group=group)}:
            checks[package] = Check(
                name,
                False if package in needed else None,
                f"no entry point {package} in {group}",
                command,
            )
        elif package not in needed:
            checks[package] = Check(name, None, "installed; not needed on a GPU")
        else:
            code = f"import json, {package}; print(json.dumps({package}.check()))"
            environment = (
                os.environ
                | ({"SGLANG_PLATFORM": "eyas_cpu"} if "eyas_cpu" in needed else {})
                | {"SGLANG_PLUGINS": "eyas_capture"}
            )
            processes[package] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code],
                env=environment,
                cwd=ROOT,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
    for package, process in processes.items():
        checks[package] = _plugin_answer(package, process)
    return [checks[package] for package in PLUGINS]


def _plugin_answer(package: str, process: subprocess.Popen) -> Check:
    name, command = (
        f"plugin {package}",
        "see patches/README.md: which SGLang versions it is made for, how to check it",
    )
    try:
        out, err = process.communicate(timeout=PLUGIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Check(name, False, f"no answer in {PLUGIN_TIMEOUT_S:.0f} s", command)
    if process.returncode:
        return Check(
            name,
            False,
            f"its check ended with {process.returncode}: {(err.strip() or 'no output').splitlines()[-1]}",
            command,
        )
    answer = json.loads(out.strip().splitlines()[-1])
    return Check(name, answer["ok"], f"{answer['version']}: {answer['detail']}", command)


def check_kernelspec() -> Check:
    """The notebooks' kernel, in this environment and not only somewhere in the user's home."""
    path = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
    return Check(
        "Jupyter kernel",
        path.is_file(),
        "python3" if path.is_file() else "no python3 in this environment",
        f"{_python()} -m ipykernel install --sys-prefix",
    )


def check_disk(name: str, folder: Path, need_bytes: int, command: str) -> Check:
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
    """`meminfo`: the text of /proc/meminfo."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines()}
    available = 1024 * kib["MemAvailable"]
    detail = f"{bytes_text(available)} available of {bytes_text(1024 * kib['MemTotal'])}, the demo takes up to {bytes_text(MEMORY_BYTES)}"
    return Check(
        "memory",
        available >= MEMORY_BYTES,
        detail,
        "end other programs, or set max_total_tok and batch_tok of the profile lower",
    )


def check_target() -> Check:
    try:
        from eyas.models.target import embedded_state
    except ImportError as error:
        return Check(
            "embedded target",
            False,
            f"not looked at: {error}",
            "install the packages first, as above",
        )
    try:
        ok, detail = embedded_state()
    except EyasError as error:
        return Check("embedded target", False, error.found, error.next_command)
    return Check("embedded target", ok, detail, f"{_python()} -m eyas target")


def check_browser() -> Check:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    return Check(
        "browser",
        None,
        f"{Path(found).name}; only to test the reports"
        if found
        else "no chromium; only the test of the reports needs it, they open in any browser",
    )


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> str:
    return ".venv/bin/python" if Path(sys.prefix) == ROOT / ".venv" else "python"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
