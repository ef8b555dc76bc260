"""Read settings as YAML, `papermill -p` and `eyas -p` write them.

What is plainly meant is accepted. Anything else is refused by name.
"""

import argparse
import dataclasses

import pytest

from eyas.cli import main
from eyas.config import GROUPS, REMOVED, SETTINGS, Config, read_profile, verified_tok
from eyas.errors import EyasError


@pytest.mark.parametrize(
    "given", [[3, 16, 28], (3, 16, 28), "[3, 16, 28]", "3,16,28", " (3, 16, 28) "]
)
def test_boundaries_however_they_are_written(given):
    assert Config.create(boundaries=given).boundaries == (3, 16, 28)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("learning_rate", "1e-4", 1e-4),
        ("epochs", "2", 2.0),
        ("seed", "7", 7),
        ("max_length", 64.0, 64),
        ("store_fp8", "True", True),
        ("store_fp8", "false", False),
        ("chat_template_kwargs", '{"enable_thinking": false}', '{"enable_thinking": false}'),
    ],
)
def test_strings_become_what_the_setting_is(name, given, value):
    found = getattr(Config.create(**{name: given}), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("boundaries", "2,x"),
        ("boundaries", "[2, 1.5]"),
        ("boundaries", [True, 2]),
        ("boundaries", "27,2"),
        ("boundaries", "2,2"),
        ("boundaries", "-1,2"),
        ("store_fp8", "yes"),
        ("store_fp8", 1),
        ("epochs", "nan"),
        ("epochs", True),
        ("epochs", 0),
        ("seed", 1.5),
        ("seed", "one"),
        ("run_name", 3),
        ("run_name", "../else"),
        ("device", "gpu"),
        ("loss", "mse"),
        ("max_length", 4096),
        ("server_url", "localhost:30000"),
        ("port", 70000),
        ("port", -1),
        ("warmup_ratio", 1),
        ("check_bf16_prompts", -1),
        ("tune_rounds", 2),
        ("notebooks", "1"),
        ("server_args", "8"),
        ("server_args", "--stream-interval 8 --stream-interval 9"),
        ("server_args", "--stream-interval '8"),
        ("server_env", "NCCL_PROTO"),
        ("server_env", "A=1 A=2"),
        ("chat_template_kwargs", "enable_thinking"),
        ("chat_template_kwargs", "[false]"),
        ("chat_template_kwargs", "{}"),
        ("chat_template_kwargs", '{"messages": []}'),
        ("chat_template_kwargs", '{"t": NaN}'),
        ("chat_template_kwargs", '{"enable thinking": false}'),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_what_a_setting_cannot_be(name, given):
    with pytest.raises(EyasError, match=f"^{name} = ") as error:
        Config.create(**{name: given})
    assert error.value.expected and error.value.next_command == "python -m eyas settings"


@pytest.mark.parametrize("name, given", [("device", "gpu"), ("epochs", 0), ("seed", 1.5)])
def test_a_wrong_value_is_said_in_plain_words(name, given):
    """Also where a Config is made from another one; pydantic's own words are never shown."""
    said = {
        "device": "device = 'gpu'; expected 'cpu' or 'cuda'",
        "epochs": "epochs = 0.0; expected more than 0",
        "seed": "seed = 1.5; expected a whole number",
    }[name]
    for make in (Config.create, lambda **values: dataclasses.replace(Config(), **values)):
        with pytest.raises(EyasError) as error:
            make(**{name: given})
        assert str(error.value) == f"{said}; next: python -m eyas settings"


def test_a_profile_writes_a_setting_flat_or_in_its_group(tmp_path, capsys):
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "run_name: mine\ntarget: {target: models/x, boundaries: '[1, 2]'}\n"
        "training: {epochs: 3, learning_rate: 1e-4}\nserver.port: 7\n"
    )
    flat = {
        "run_name": "mine",
        "target": "models/x",
        "boundaries": "[1, 2]",
        "epochs": 3,
        "learning_rate": "1e-4",
        "port": 7,
    }
    assert read_profile(str(profile)) == flat
    assert Config.load(str(profile)) == Config.create(**flat)
    overrides = {"training.epochs": "5", "server": {"port": 8}}
    assert Config.load(str(profile), **overrides) == Config.create(
        **flat | {"epochs": 5, "port": 8}
    )
    assert main(["settings", "--profile", str(profile), "-p", "training.epochs", "4"]) == 0
    assert " = 4.0 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, said",
    [
        ({"training": {"epoch": 3}}, "unknown setting epoch; expected did you mean epochs?"),
        (
            {"server": {"epochs": 3}},
            "setting server.epochs; expected did you mean training.epochs?",
        ),
        ({"server.epochs": 3}, "setting server.epochs; expected did you mean training.epochs?"),
        ({"learning": {"epochs": 3}}, "unknown setting learning"),
        ({"training": 3}, "training = 3; expected settings of the group training"),
        ({"training": {"epochs": 3}, "epochs": 3}, "epochs is given twice"),
    ],
)
def test_a_group_that_is_wrong_is_refused(given, said):
    with pytest.raises(EyasError) as error:
        Config.create(**given)
    assert said in str(error.value)


def test_every_setting_is_explained_in_its_group(capsys):
    assert main(["settings"]) == 0
    parts = capsys.readouterr().out.strip().split("\n\n")
    assert [part.splitlines()[0] for part in parts] == [f"{group}:" for group in GROUPS]
    shown = {line.split()[0]: line for part in parts for line in part.splitlines()[1:]}
    assert set(shown) == set(SETTINGS)
    for name, line in shown.items():
        meaning = SETTINGS[name].meaning
        assert line.endswith(f"# {meaning}") and len(meaning) > 20 and meaning[-1] == "."


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_earlier_versions_is_refused_with_what_to_write_instead(name):
    default, instead = REMOVED[name]
    assert name not in SETTINGS
    with pytest.raises(EyasError, match=f"^{name} = .* is no longer a setting; expected instead "):
        Config.create(**{name: 77})
    with pytest.raises(EyasError, match=f"^{name} = .* is no longer a setting.*was the default"):
        Config.create(**{name: default})
    setting, _, text = instead.partition(": ")
    if setting in SETTINGS and text.startswith(("--", "NCCL", "GOMP", "THP", "OMP")):
        Config.create(**{setting: text.format(value=77)})  # what the message says is accepted


# What capture, the client or the identity of a store depend on, as SGLang's own parser names it
REFUSED = """
    --model-path --model --host --port --device --dtype --tp-size --tensor-parallel-size
    --context-length --max-total-tokens --max-prefill-tokens --chunked-prefill-size
    --enable-mixed-chunk --cuda-graph-backend-prefill --cuda-graph-config --random-seed
    --disable-radix-cache --disable-overlap-schedule --trust-remote-code --pp-size --dp-size
    --config --quantization --kv-cache-dtype --load-format --json-model-override-args --api-key
    --speculative-algorithm --speculative-num-steps --forward-hooks --radix-cache-backend
    --disaggregation-mode --enable-lora --tokenizer-path --help
""".split()


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_capture_depends_on_is_refused_by_name(flag):
    for text in (flag, f"{flag} 1", f"--stream-interval 8 {flag}=1", flag[:-1]):
        with pytest.raises(EyasError, match="^server_args = .* without --") as error:
            Config.create(server_args=text)
        assert flag[:-1] in str(error.value)


def test_the_flags_that_are_refused_are_sglangs():
    from sglang.srt.server_args import ServerArgs

    from eyas.passthrough import REFUSED_FAMILIES, REFUSED_FLAGS, SETTING_OF_FLAG

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {*REFUSED, *REFUSED_FLAGS, *SETTING_OF_FLAG} <= known
    assert all(any(option.startswith(family) for option in known) for family in REFUSED_FAMILIES)
    assert set(SETTING_OF_FLAG.values()) <= set(SETTINGS)


@pytest.mark.parametrize(
    "variable",
    "EYAS_CAPTURE SGLANG_PLUGINS SGLANG_PLATFORM HF_HUB_OFFLINE PYTHONPATH PATH LD_PRELOAD".split(),
)
def test_a_variable_that_capture_depends_on_is_refused_by_name(variable):
    with pytest.raises(EyasError, match=f"^server_env = .* without {variable}"):
        Config.create(server_env=f"NCCL_PROTO=LL {variable}=x")


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(EyasError, match="unknown setting epoch.*did you mean epochs"):
        Config.create(epoch=1)


def test_tokens_of_a_verify_step_count_the_committed_one():
    assert verified_tok(3, 1) == verified_tok(3, 1, 4) == 4
    assert verified_tok(3, 4, 16) == 16 and verified_tok(6, 10) == 61
    for wrong in (
        (3, 1, 5),
        (3, 4, 38),
        (3, 4, 1),
    ):  # 4 + 2 * 16 candidates and the committed token are 37
        with pytest.raises(EyasError):
            verified_tok(*wrong)
    with pytest.raises(EyasError, match="only a chain"):
        verified_tok(3, 2, 0, rejection_sampling=True)
