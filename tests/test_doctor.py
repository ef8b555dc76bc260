"""The doctor: each thing wrong is noticed and comes with what to type; the plugins are applied for
real, once.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas import cli, doctor
from eyas.doctor import Check
from eyas.files import ROOT
from eyas.models import target
from helpers.templates import CHATML, OPENS, STRIPS, THINKS
from helpers.tiny import make_tiny_target

GIB = 2**30


def test_all_is_well_here_and_both_plugins_apply(embedded, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "MEMORY_BYTES", 0)  # another process of tests may hold it
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert (
        "WRONG" not in out
        and len(out.splitlines()) <= 24
        and max(map(len, out.splitlines())) <= 150
    )  # one screen
    for text in (
        "4 hooks applied",
        "plain CPU platform",
        f"{len(doctor.read_lock(doctor.lock_path()))} of ",
        "SmolLM2-135M-Instruct, converted",
        "0.5.23",
    ):
        assert text in out


def test_what_is_wrong_is_said_with_the_command_and_exit_code_1(monkeypatch, capsys):
    found = [
        Check("Python", True, "3.11.7"),
        Check("disk", False, "1 KiB free", "set EYAS_DATA"),
        Check("cores", None, "2"),
    ]
    monkeypatch.setattr(doctor, "doctor", lambda: found)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "  WRONG disk" in out and out.endswith("What to do:\n  disk: set EYAS_DATA\n")
    monkeypatch.setattr(doctor, "doctor", lambda: found[:1] + found[2:])
    assert cli.main(["doctor"]) == 0 and "make demo" in capsys.readouterr().out


def test_python():
    assert doctor.check_python((3, 11, 0)).ok
    for version in ((3, 10, 9), (3, 12, 0), (4, 11, 0)):
        check = doctor.check_python(version)
        assert check.ok is False and "PYTHON=" in check.command


def test_packages_missing_and_of_another_version(tmp_path, monkeypatch):
    lock = tmp_path / "cpu.txt"
    lock.write_text("# comment\nGood_One==1.0\n\nabsent==2.0  # why\nother.one==3.0\n")
    assert doctor.read_lock(lock) == {"good-one": "1.0", "absent": "2.0", "other-one": "3.0"}
    monkeypatch.setattr(doctor, "_installed", {"good-one": "1.0", "other-one": "3.1"}.get)
    check = doctor.check_packages(lock)
    assert check.ok is False
    assert check.detail == (
        "1 of 3 as in requirements/cpu.txt; missing: absent; other version: other-one 3.1 "
        "(locked: 3.0)"
    )
    assert check.command.endswith("pip install --no-deps -r requirements/cpu.txt")
    monkeypatch.setattr(
        doctor, "_installed", {"good-one": "1.0", "absent": "2.0", "other-one": "3.0"}.get
    )
    assert doctor.check_packages(lock).ok


@pytest.fixture
def entry_points(monkeypatch):
    """Only a plugin of this name is found, and it is asked by its name alone."""

    class Point:
        name = "eyas_capture"

    monkeypatch.setattr(
        doctor.importlib.metadata,
        "entry_points",
        lambda group: [Point] if group == "sglang.srt.plugins" else [],
    )


def plugin(folder: Path, monkeypatch, body: str) -> None:
    (folder / "eyas_capture.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_plugins_that_fail_hang_or_are_absent(tmp_path, monkeypatch, entry_points):
    plugin(
        tmp_path,
        monkeypatch,
        (
            "def check():\n    print('noise of an import')\n    return {'version': '9', 'ok': "
            "False, 'detail': 'not applied: run_batch'}\n"
        ),
    )
    capture, cpu = doctor.check_plugins(("eyas_capture", "eyas_cpu"))
    assert (
        capture.ok is False
        and capture.detail == "9: not applied: run_batch"
        and "patches/README.md" in capture.command
    )
    assert (
        cpu.ok is False
        and "no entry point" in cpu.detail
        and cpu.command.endswith("-e patches/cpu")
    )

    plugin(tmp_path, monkeypatch, "raise ImportError('no SGLang here')\n")
    capture, cpu = doctor.check_plugins(("eyas_capture",))
    assert capture.ok is False and "ended with 1: ImportError: no SGLang here" in capture.detail
    assert cpu.ok is None  # a GPU box needs none

    plugin(tmp_path, monkeypatch, "import time\ndef check(): time.sleep(60)\n")
    monkeypatch.setattr(doctor, "PLUGIN_TIMEOUT_S", 1.0)
    capture, _ = doctor.check_plugins(("eyas_capture",))
    assert capture.ok is False and "no answer in 1 s" in capture.detail


def test_kernelspec(tmp_path, monkeypatch):
    assert doctor.check_kernelspec().ok
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    check = doctor.check_kernelspec()
    assert check.ok is False and check.command.endswith("-m ipykernel install --sys-prefix")


def test_disk_and_memory(tmp_path):
    folder = tmp_path / "not" / "made" / "yet"
    assert doctor.check_disk("data folder", folder, 1, "free some").ok and not folder.exists()
    check = doctor.check_disk("data folder", folder, 2**60, "free some")
    assert check.ok is False and check.command == "free some"
    meminfo = (
        "MemTotal:       16384000 kB\nMemFree:          100000 kB\nMemAvailable:    {} "
        "kB\nHugePages_Total:       0\n"
    )
    assert (
        doctor.check_memory(meminfo.format(8 * 2**20)).ok
        and doctor.check_memory(meminfo.format(2**20)).ok is False
    )


def test_embedded_target_absent_or_altered(embedded, data):
    check = doctor.check_target()
    assert check.ok is None and "not converted yet" in check.detail
    folder = data / "targets" / embedded.name
    folder.mkdir(parents=True)
    for path in embedded.folder.iterdir():
        (folder / path.name).symlink_to(path)
    assert doctor.check_target().ok is True
    (folder / "tokenizer.json").unlink()
    check = doctor.check_target()
    assert (
        check.ok is False
        and "tokenizer.json" in check.detail
        and check.command.endswith("-m eyas doctor --target embedded")
    )


def test_it_works_without_any_package():
    """A Python with nothing installed gets the screen, not a traceback."""
    code = (
        "import sys; sys.path.insert(0, 'lib'); from eyas import cli; raise "
        "SystemExit(cli.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and not done.stderr
    for text in (
        "WRONG packages",
        "missing: ",
        "no entry point eyas_capture",
        "WRONG embedded target",
        "pip install",
    ):
        assert text in done.stdout


# ---- a target


KIMI = {  # the facts of its config.json that count here
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"},
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "kv_lora_rank": 512,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
}


def asked(folder: Path, config: dict, capsys) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    code = cli.main(["doctor", "--target", str(folder)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_a_whole_target_of_each_family(tmp_path, capsys, family):
    make_tiny_target(tmp_path / "tiny", n_blocks=8, family=family)
    assert cli.main(["doctor", "--target", str(tmp_path / "tiny")]) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out and "  -     " not in out and f"{family}ForCausalLM, 8 blocks" in out
    assert (
        f"2, 4, 5, ids {'2, 4, 5' if family == 'DeepseekV3' else '1, 3, 4'} for SGLang" in out
        and "tokens of two turns supervised" in out
    )
    assert ("latent attention" in out) == (family == "DeepseekV3")
    facts = out.partition("Its facts:\n")[2]
    assert re.search(r"^blocks \(N\) +8$", facts, re.M) and "default boundaries   2, 4, 5" in facts


def kimi(folder: Path) -> dict:
    """A config.json of Kimi-K2.5's architecture, with its text model's beside other files."""
    make_tiny_target(folder, n_blocks=8, family="DeepseekV3")
    text = json.loads((folder / "config.json").read_text())
    return {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}


def processor_line(folder: Path, config: dict, capsys) -> str:
    _, out = asked(folder, config, capsys)
    return next((line for line in out.splitlines() if line.split()[1:2] == ["processor"]), "")


def test_a_missing_file_of_the_processor_is_named(tmp_path, capsys):
    """SGLang ends in AutoProcessor without it, for each architecture of its own list."""
    folder = tmp_path / "kimi"
    config = kimi(folder)
    line = processor_line(folder, config, capsys)
    assert "WRONG" in line and "preprocessor_config.json" in line
    code = {"AutoProcessor": "kimi_processor.KimiProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": code}))
    assert "lacks kimi_processor.py" in processor_line(folder, config, capsys)
    (folder / "kimi_processor.py").write_text("from .media_utils import ensure\n")
    assert "lacks media_utils.py" in processor_line(folder, config, capsys)
    (folder / "media_utils.py").write_text("ensure = None\n")
    assert "ok" in processor_line(folder, config, capsys)
    (folder / "preprocessor_config.json").unlink()
    text_only = config | {"language_model_only": True}
    assert "SGLang loads none" in processor_line(folder, text_only, capsys)


def test_missing_code_of_a_tokenizer_is_named(tmp_path, capsys):
    folder = tmp_path / "tiny"
    make_tiny_target(folder, n_blocks=8)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": own}))
    config = json.loads((folder / "config.json").read_text())
    code, out = asked(folder, config, capsys)
    assert code == 1 and "its code is not in the folder: tokenization_own.py" in out
    lines = [line.split() for line in out.splitlines()]
    assert not [words for words in lines if words[1:2] == ["processor"]], "a text model needs none"


def test_a_config_alone_is_enough(tmp_path, capsys):
    code, out = asked(tmp_path / "kimi", KIMI, capsys)
    assert (
        code == 0
        and "61 blocks" in out
        and "DeepseekV2Model of kimi_k25.py, blocks DeepseekV2DecoderLayer" in out
    )
    assert (
        "2, 30, 58, ids 2, 30, 58 for SGLang" in out
        and "code of its own      yes" in out
        and "not for quantised weights (compressed-tensors): -p device cuda" in out
    )
    assert (
        "| modelopt       | Hugging Face backend | after      | 2, 30, 58   | 2, 30, 58  "
        "| 1, 29, 57 |"
    ) in out


@pytest.mark.parametrize(
    "template, said",
    [
        (
            THINKS,
            [
                "ok    chat template        thinks: answers with thoughts (",
                "without with -p chat_template_kwargs '{\"enable_thinking\": false}' (",
                (
                    "-     several answers      the template rewrites earlier ones when more "
                    "follows, the last is supervised alone"
                ),
            ],
        ),
        (
            OPENS,
            [
                "'{\"thinking\": false}' (",
                (
                    "-     several answers      answers with thoughts: the template rewrites "
                    "earlier ones"
                ),
            ],
        ),
        (STRIPS.replace("thinking", "no_switch"), ["thinks: answers with thoughts ("]),
        (
            CHATML.replace(
                "m.content +", "(m.content if loop.last or m.role == 'user' else '...') +"
            ),
            [
                "tokens of one turn supervised",
                "several answers      the template rewrites earlier ones",
            ],
        ),
    ],
)
def test_a_template_that_thinks_or_rewrites_is_a_whole_target(tmp_path, capsys, template, said):
    """One turn and two are looked at apart: what is supported is said, with what to set."""
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=8)
    (folder / "chat_template.jinja").write_text(template)
    code, out = asked(folder, json.loads((folder / "config.json").read_text()), capsys)
    assert (
        code == 0
        and "WRONG" not in out
        and all(text in out for text in said)
        and ("without with" in out) == (template in (THINKS, OPENS))
    )


@pytest.mark.parametrize(
    "change, said, command",
    [
        (
            {"architectures": ["LlamaForCausalLMM"]},
            "none of the 290 of SGLang 0.5.23; near: LlamaForCausalLM",
            "another target",
        ),
        (
            {"architectures": ["FalconMambaForCausalLM"]},
            "no blocks with a stage boundary",
            "patches/README.md",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            "no set_eagle3_layers_to_capture",
            "not served with a drafter",
        ),
        (
            {"architectures": ["LongcatFlashForCausalLM"]},
            "layer ids of LongcatFlashForCausalLM in sglang 0.5.23 are not known",
            "FAMILIES of lib/eyas/models/layer_ids.py",
        ),
        ({"num_hidden_layers": 5}, "none with 5 blocks", None),
        ({"dtype": "float16"}, "float16; serve it with -p dtype bfloat16", None),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "not for layers of type linear_attention",
            None,
        ),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, capsys, change, said, command):
    base = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    code, out = asked(tmp_path / "target", base | change, capsys)
    assert (
        said in out
        and code == (command is not None)
        and (command is None or command in out.split("What to do:")[1])
    )


def test_files_of_a_target_that_are_broken(tmp_path, capsys):
    assert (
        cli.main(["doctor", "--target", str(tmp_path / "nothing")]) == 1
        and "WRONG config.json" in capsys.readouterr().out
    )
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=8)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    code, out = asked(
        folder, json.loads((folder / "config.json").read_text()) | {"vocab_size": 100}, capsys
    )
    assert code == 1
    for said in (
        "512 tokens of 100",
        "WRONG chat template",
        "1 of 2 files missing: model-2.safetensors",
    ):
        assert said in out


def test_the_embedded_target_is_made_and_shows_its_facts(embedded, data, capsys, monkeypatch):
    """`doctor --target embedded` on a fresh data folder; the conversion itself: test_target.py."""

    def copy(_source, folder, _manifest):
        shutil.copytree(embedded.folder, folder)

    monkeypatch.setattr(target, "_convert", copy)
    assert cli.main(["doctor", "--target", "embedded"]) == 0
    assert (data / "targets" / embedded.name / "model.safetensors").is_file()
    facts = capsys.readouterr().out.partition("Its facts:\n")[2]
    assert f"fingerprint          {embedded.fingerprint[:16]}" in facts
