"""What `drafter export` prints serves the drafter as it was judged: SGLang's own parser reads the line."""

import argparse
import json
import shlex

import pytest
import torch

from eyas.cli import main
from eyas.config import Config
from eyas.models.drafter import DrafterConfig, initial_drafter, save_drafter
from eyas.models.target import load_target
from eyas.models.vocab import DraftVocab
from helpers.tiny import make_tiny_target

TREE = [
    "-p",
    "speculative_num_steps",
    "4",
    "-p",
    "speculative_eagle_topk",
    "2",
    "-p",
    "speculative_num_draft_tokens",
    "7",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder with a drafter of run `mine`, of a tiny target in a folder whose name a shell
    would part.
    """
    folder = tmp_path_factory.mktemp("hints")
    target = load_target(str(make_tiny_target(folder / "my model", n_blocks=6, seed=1)))
    drafter = initial_drafter(
        DrafterConfig.from_target(target, (2, 3, 4), 64, norm_output=True),
        DraftVocab(torch.arange(64), target.vocab_size),
        target,
        0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_DATA", str(folder / "data"))
        save_drafter(
            drafter,
            Config.create(run_name="mine").drafter_dir,
            {"target": {"name": target.name, "fingerprint": target.fingerprint}},
        )
        yield folder


def export(folder, capsys, *more: str) -> tuple[list[str], str]:
    """The words of the command that `drafter export` prints, and all that it prints."""
    assert (
        main(
            [
                "drafter",
                "export",
                "-p",
                "run_name",
                "mine",
                "-p",
                "target",
                str(folder / "my model"),
                *more,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    return shlex.split(
        next(
            line for line in out.splitlines() if line.startswith(("python -m sglang", "vllm serve"))
        )
    ), out


def test_line_for_sglang(folder, capsys):
    from sglang.srt.server_args import ServerArgs

    words, out = export(
        folder, capsys, *TREE, "-p", "tensor_parallel", "2", "-p", "trust_remote_code", "true"
    )
    assert words[:3] == ["python", "-m", "sglang.launch_server"] and "norm_output" in out
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(words[3:])
    assert (
        found.speculative_num_steps,
        found.speculative_eagle_topk,
        found.speculative_num_draft_tokens,
    ) == (4, 2, 7), "as judged, not SGLang's own choice"
    assert (found.speculative_algorithm, found.speculative_draft_model_path) == (
        "EAGLE3",
        str(folder / "data" / "runs" / "mine" / "export"),
    )
    assert (found.model_path, found.dtype, found.tp_size, found.trust_remote_code) == (
        str(folder / "my model"),
        "bfloat16",
        2,
        True,
    )


def test_a_chain_has_a_token_more_than_steps(folder, capsys):
    words, _ = export(folder, capsys)
    assert words[-6:] == [
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "4",
    ]


def test_line_for_vllm(folder, capsys):
    """No vLLM here: the words, and that it says so."""
    words, out = export(folder, capsys, "--to", "vllm", "-p", "speculative_num_steps", "5")
    assert words[:-1] == [
        "vllm",
        "serve",
        str(folder / "my model"),
        "--dtype",
        "bfloat16",
        "--speculative-config",
    ]
    assert json.loads(words[-1]) == {
        "method": "eagle3",
        "model": str(folder / "data" / "runs" / "mine" / "export" / "vllm"),
        "num_speculative_tokens": 5,
    }
    assert "never run here" in out and "norm_output" in out
