"""Is everything here that Eyas needs, and what to type where it is not: `python -m eyas doctor`, one screen.

The two plugins are not only looked for: each is applied in a process of its own, since SGLang merely logs a hook that fails.
Only the standard library is imported here, so that it also works where packages are missing.
"""

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
from eyas.files import ROOT, data_dir
from eyas.progress import bytes_text

GIB = 2**30
PLUGINS = {"eyas_capture": "sglang.srt.plugins", "eyas_cpu": "sglang.srt.platforms"}  # package -> entry-point group
PLUGIN_TIMEOUT_S = 600.0  # it imports the scheduler of SGLang: 10 s on a quiet machine, minutes on one that is busy elsewhere
DATA_BYTES, TEMPORARY_BYTES, MEMORY_BYTES = 3 * GIB, GIB // 2, 4 * GIB  # what the demo takes, rounded up
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
        Check("SGLang", _installed("sglang") is not None, f"{_installed('sglang')}, {'in full, with GPU kernels' if gpu else 'without GPU kernels: device cpu'}"
              if _installed("sglang") else "not installed", "rm -f .venv/.ready && make doctor"),
        *check_plugins(needed=("eyas_capture",) if gpu else tuple(PLUGINS)),
        check_kernelspec(),
        check_disk("data folder", data_dir(), DATA_BYTES, "set EYAS_DATA to a folder on a larger disk"),
        check_disk("temporary folder", Path(tempfile.gettempdir()), TEMPORARY_BYTES, "set TMPDIR to a folder on a larger disk"),
        check_memory(Path("/proc/meminfo").read_text(encoding="utf-8")),
        Check("cores", None, f"{len(os.sched_getaffinity(0))} usable; settings `threads` of a profile says how many are used"),
        check_target(),
        check_browser(),
    ]


def screen(checks: list[Check]) -> str:
    """One line a check, then the command for each thing that is wrong."""
    marks = {True: "ok", False: "WRONG", None: "-"}
    lines = [f"Eyas {__version__}", *(f"  {marks[c.ok]:6}{c.name:21}{c.detail}" for c in checks)]
    wrong = [c for c in checks if c.ok is False]
    if not wrong:
        return "\n".join([*lines, "Everything that is needed is here; next: make demo"])
    return "\n".join([*lines, "What to do:", *(f"  {c.name}: {c.command}" for c in wrong)])


def lock_path() -> Path:
    """The list that this environment follows: gpu.txt where SGLang's GPU kernels are installed."""
    return ROOT / "requirements" / ("gpu.txt" if _installed("sglang-kernel") else "cpu.txt")


def check_python(version: tuple[int, int, int]) -> Check:
    return Check("Python", version[:2] == (3, 11), ".".join(map(str, version)) + f", {sys.prefix}" * (sys.prefix == sys.base_prefix),
                 "install Python 3.11, then make clean doctor PYTHON=python3.11")


def read_lock(path: Path) -> dict[str, str]:
    """Package (its name normalised as in PEP 503) -> version, from lines `name==version`."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines if line)}


def check_packages(lock: Path) -> Check:
    wanted = read_lock(lock)
    missing = [name for name in wanted if _installed(name) is None]
    other = [f"{name} {_installed(name)} (locked: {version})" for name, version in wanted.items() if name not in missing and _installed(name) != version]
    detail = f"{len(wanted) - len(missing) - len(other)} of {len(wanted)} as in requirements/{lock.name}"
    detail += f"; missing: {_few(missing)}" * bool(missing) + f"; other version: {_few(other)}" * bool(other)
    if lock.name == "cpu.txt":
        return Check("packages", not missing and not other, detail, f"{_python()} -m pip install --no-deps -r requirements/cpu.txt")
    return Check("packages", not missing and not other, detail, f"{_python()} -m pip install -r requirements/gpu.txt")


def check_plugins(needed: tuple[str, ...]) -> list[Check]:
    """A check per plugin: found by its entry point, then `check()` of the package in a process of its own (both run at once)."""
    processes, checks = {}, {}
    for package, group in PLUGINS.items():
        name, command = f"plugin {package}", f"{_python()} -m pip install --no-deps --no-build-isolation -e patches/{package.removeprefix('eyas_')}"
        if package not in {point.name for point in importlib.metadata.entry_points(group=group)}:
            checks[package] = Check(name, False if package in needed else None, f"no entry point {package} in {group}", command)
        elif package not in needed:
            checks[package] = Check(name, None, "installed; not needed on a GPU")
        else:
            code = f"import json, {package}; print(json.dumps({package}.check()))"
            environment = os.environ | ({"SGLANG_PLATFORM": "eyas_cpu"} if "eyas_cpu" in needed else {}) | {"SGLANG_PLUGINS": "eyas_capture"}
            processes[package] = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=environment, cwd=ROOT, text=True,
                                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for package, process in processes.items():
        checks[package] = _plugin_answer(package, process)
    return [checks[package] for package in PLUGINS]


def _plugin_answer(package: str, process: subprocess.Popen) -> Check:
    name, command = f"plugin {package}", "see patches/README.md: which SGLang versions it is made for, how to check it"
    try:
        out, err = process.communicate(timeout=PLUGIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Check(name, False, f"no answer in {PLUGIN_TIMEOUT_S:.0f} s", command)
    if process.returncode:
        return Check(name, False, f"its check ended with {process.returncode}: {(err.strip() or 'no output').splitlines()[-1]}", command)
    answer = json.loads(out.strip().splitlines()[-1])
    return Check(name, answer["ok"], f"{answer['version']}: {answer['detail']}", command)


def check_kernelspec() -> Check:
    """The notebooks' kernel, in this environment and not only somewhere in the user's home."""
    path = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
    return Check("Jupyter kernel", path.is_file(), "python3" if path.is_file() else "no python3 in this environment",
                 f"{_python()} -m ipykernel install --sys-prefix")


def check_disk(name: str, folder: Path, need_bytes: int, command: str) -> Check:
    existing = folder.absolute()
    while not existing.exists():  # the data folder is made at first use
        existing = existing.parent
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    if not os.access(existing, os.W_OK):
        return Check(name, False, f"{shown} can't be written", command)
    free = shutil.disk_usage(existing).free
    return Check(name, free >= need_bytes, f"{shown}: {bytes_text(free)} free, the demo takes up to {bytes_text(need_bytes)}", command)


def check_memory(meminfo: str) -> Check:
    """`meminfo`: the text of /proc/meminfo."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines()}
    available = 1024 * kib["MemAvailable"]
    detail = f"{bytes_text(available)} available of {bytes_text(1024 * kib['MemTotal'])}, the demo takes up to {bytes_text(MEMORY_BYTES)}"
    return Check("memory", available >= MEMORY_BYTES, detail, "end other programs, or set max_total_tok and batch_tok of the profile lower")


def check_target() -> Check:
    try:
        from eyas.target import embedded_state
    except ImportError as error:
        return Check("embedded target", False, f"not looked at: {error}", "install the packages first, as above")
    try:
        ok, detail = embedded_state()
    except EyasError as error:
        return Check("embedded target", False, error.found, error.next_command)
    return Check("embedded target", ok, detail, f"{_python()} -m eyas target")


def check_browser() -> Check:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    return Check("browser", None, f"{Path(found).name}; only to look at pages" if found else "no chromium; nothing needs it, reports open in any browser")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> str:
    return ".venv/bin/python" if Path(sys.prefix) == ROOT / ".venv" else "python"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
