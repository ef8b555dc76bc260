"""Settings as YAML, `papermill -p` and `eyas -p` hand them over: what is plainly meant is taken, anything else is refused by name."""

import pytest

from eyas.config import Config, verified_tok
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
