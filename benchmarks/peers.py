"""The peers' own training steps on a CPU, in a process of their own: `PEER/bin/python
benchmarks/peers.py JOB.json` (by contestants.py, which writes the job).

Run by the interpreter of an environment that has the peer, so nothing of Eyas is imported here.
What is theirs: reader, collator, model, loss, optimiser, schedule, gradient clipping. What is not:
their `Trainer` classes move everything to a GPU, so the loop around the step is written again
below, line by line as theirs is; SpecForge's Triton loss is replaced by the function beside it in
the same file that it is tested against; speculators runs its eager loss.

Commands come as JSON lines on stdin and are answered on stdout, so that the contestants of a
benchmark can take turns: {"steps": n} takes the next n optimiser steps, {"memory": true} says the
peak, {"save": path, "row": i} writes the weights and, for the check of a conversion, the logits of
all draft steps on sample i.
"""

import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

CHECK_SLOTS = 64  # slots whose logits are saved
# the first product of a new shape takes a CPU in bfloat16 several times as long as the next: it
# compiles a kernel
ROWS = 64


class Commands:
    """One JSON line in, one out. Whatever else prints goes to stderr."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def next(self) -> dict | None:
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, **found) -> None:
        print(json.dumps(found), file=self.out)


def memory_bytes(field: str) -> int:
    """Of this process, from /proc:

    "VmHWM" its largest resident set so far, "VmRSS" the one now. (ru_maxrss begins with the
    parent's.)
    """
    return status_bytes(Path("/proc/self/status").read_text(), field)


def status_bytes(text: str, field: str) -> int:
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) * 1024


def weight(target: str, *endings: str):
    """The first of these tensors of a Hugging Face folder that is there."""
    from safetensors import safe_open

    for path in sorted(Path(target).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for ending in endings:
                for name in file.keys():
                    if name.endswith(ending):
                        return file.get_tensor(name)
    raise KeyError(endings)


def vocab_maps(ids: list[int], vocab_size: int):
    """d2t [D], offsets, and t2d [V], as both peers have them."""
    import torch

    ids = torch.tensor(ids)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


class SpecForge:
    """specforge 0.2.0: padded batches, `OnlineEagle3Model`, `Eagle3TrainStrategy`, `BF16Optimizer`.
    options:

    compile True: their `torch.compile` decorators (norms, loss, teacher) act, as they do by
    themselves; False: TORCHDYNAMO_DISABLE=1 compact True: their `compact_teacher`, which does not
    materialise the logits of the whole vocabulary batching "padded": a batch of the step's samples;
    "accumulated": one sample at a time, gradients added up, nothing padded weights for bf16:
    "bfloat16" as they train, with float32 copies in the optimiser, or "float32" under autocast pad
    True: batches are padded further, to a multiple of ROWS tokens, so that a CPU's bfloat16
    products meet few shapes; False: to the longest sample, as it does itself
    """

    def __init__(self, job: dict):
        import specforge.algorithms.eagle3.model as model_file
        import torch
        from specforge.algorithms.eagle3.data import (
            build_offline_collator,
            build_offline_normalizer,
            build_offline_reader,
        )
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.algorithms.eagle3.providers import algorithm_providers
        from specforge.core.loss import _compute_loss
        from specforge.modeling.auto import AutoDraftModel
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.runtime.contracts import TrainBatch
        from specforge.runtime.data_plane.feature_store import LocalFeatureStore
        from specforge.training.model_loading import resolve_draft_config
        from specforge.training.strategies.base import Eagle3TrainStrategy

        model_file.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
        self.options, self.Batch = job["options"], TrainBatch
        self.dtype = getattr(
            torch, self.options["weights"] if job["dtype"] == "bfloat16" else "float32"
        )
        self.autocast = job["dtype"] == "bfloat16" and self.dtype == torch.float32
        source = SimpleNamespace(
            target_model_path=job["target"],
            cache_dir=None,
            trust_remote_code=False,
            draft_model_config=None,
            draft_checkpoint_path=None,
            draft_num_hidden_layers=None,
            draft_block_size=None,
        )
        config = resolve_draft_config(
            SimpleNamespace(model=source, training=SimpleNamespace(strategy="eagle3")),
            provider=algorithm_providers().model.draft_config,
        )
        config.draft_vocab_size = len(job["vocab"])
        draft = AutoDraftModel.from_config(config, attention_backend="sdpa", torch_dtype=self.dtype)
        draft.load_embedding(job["target"])
        draft.freeze_embedding()
        d2t, t2d = vocab_maps(job["vocab"], config.vocab_size)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
        self.draft = draft
        self.model = OnlineEagle3Model(
            draft, length=job["draft_steps"], attention_backend="sdpa"
        ).to(self.dtype)
        head = TargetHead(
            job["target"]
            # its from_pretrained wants a sharded checkpoint with a head of its own; bf16 is what it
            # makes of the head
        )
        with torch.no_grad():
            head.fc.weight.copy_(weight(job["target"], "lm_head.weight", "embed_tokens.weight"))
        head.freeze_weights()
        self.strategy = Eagle3TrainStrategy(
            self.model,
            target_head=head.eval().to(torch.bfloat16),
            compact_teacher=self.options["compact"],
        )
        self.optimizer = BF16Optimizer(
            draft,
            job["learning_rate"],
            weight_decay=0.0,
            max_grad_norm=0.5,
            total_steps=len(job["steps"]),
            warmup_ratio=0.015,
        )
        refs = build_offline_reader(
            job["files"],
            run_id="benchmark",
            ttt_length=job["draft_steps"],
            max_len=job["max_length"],
        ).read()
        refs.sort(
            key=lambda ref: int(Path(ref.feature_store_uri).name.split("_")[1].split(".")[0])
        )  # theirs is the order of the names, 10 before 2
        store, normalize = LocalFeatureStore(), build_offline_normalizer(job["max_length"])
        self.read = lambda row: {
            name: t.clone() for name, t in normalize(store.get(refs[row])[0]).items()
        }
        self.collator = build_offline_collator()

    def collate(self, samples: list[dict]) -> dict:
        import torch.nn.functional as F

        tensors = self.collator(samples)
        n = -tensors["input_ids"].shape[1] % ROWS if self.options["pad"] else 0
        return {
            name: F.pad(t, (0, n) if t.dim() == 2 else (0, 0, 0, n)) if n and t is not None else t
            for name, t in tensors.items()
        }  # [B, T] or [B, T, features]

    def step(self, samples: list[dict]) -> float:
        import torch

        batches = (
            [[sample] for sample in samples]
            if self.options["batching"] == "accumulated"
            else [samples]
        )
        total = 0.0
        for batch in batches:
            tensors = self.collate(batch)
            tensors["hidden_state"] = tensors["hidden_state"].to(
                torch.bfloat16 if self.autocast else self.dtype
            )  # as their FSDP wrapper casts inputs
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.strategy.forward_loss(
                    self.Batch(["benchmark"], "eagle3", tensors, {"target_repr": "hidden_state"})
                ).loss / len(batches)
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total

    def state(self) -> dict:
        return {
            name.replace("midlayer.", "layers.0."): t for name, t in self.draft.state_dict().items()
        }

    def forward(self, sample: dict):
        self.model.float()
        tensors = self.collate([sample | {"hidden_state": sample["hidden_state"].float()}])
        self.strategy.forward_loss(
            self.Batch(["benchmark"], "eagle3", tensors, {"target_repr": "hidden_state"})
        )


class Speculators:
    """speculators 0.9.0: packed batches, `Eagle3DraftModel`, `build_optimizers`, linear schedule.
    Defaults are those of its `TrainConfig`. options:

    attention "eager" or "sdpa": its default, flex attention, has no backward on a CPU optimizer
    "adamw" or "muon" (its default) norms True: its default flags norm_before_residual,
    norm_before_fc and norm_output; False: none of them pad True: packs are padded to one length, as
    it does itself, so that a CPU's bfloat16 products meet one shape; False: no padding, and a new
    shape each step
    """

    def __init__(self, job: dict):
        import torch
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.cli import create_transformer_layer_config
        from speculators.train.config.schema import TrainConfig
        from speculators.train.data import ArrowDataset, CollateFn
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
        from transformers import get_linear_schedule_with_warmup

        self.options, self.dtype = job["options"], getattr(torch, job["dtype"])
        flat = TrainConfig(speculator_type="eagle3").flatten() | {
            "verifier_name_or_path": job["target"],
            "target_layer_ids": job["boundaries"],
            "draft_vocab_size": len(job["vocab"]),
            "ttt_steps": job["draft_steps"],
            "draft_attn_impl": self.options["attention"],
            "loss_implementation": "eager",
            "optimizer": self.options["optimizer"],
        }
        if not self.options["norms"]:
            flat |= {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
        layer = create_transformer_layer_config(
            job["target"],
            flat["num_layers"],
            flat["draft_arch"],
            flat["draft_hidden_act"],
            flat["sliding_window"],
            [],
        )
        d2t, t2d = vocab_maps(job["vocab"], layer.vocab_size)
        self.model = Eagle3DraftModel.from_training_args(
            verifier_config=layer, t2d=t2d, d2t=d2t, **flat
        ).train()
        self.arguments, _ = Eagle3DraftModel.get_trainer_kwargs(**flat)
        config = TrainerConfig(
            lr=job["learning_rate"],
            num_epochs=1,
            save_path="",
            optimizer=flat["optimizer"],
            weight_decay=flat["weight_decay"],
            muon_lr=job["learning_rate"],
            muon_momentum=flat["muon_momentum"],
            muon_weight_decay=flat["muon_weight_decay"],
            muon_ns_steps=flat["muon_ns_steps"],
        )
        self.optimizers = build_optimizers(self.model, config)
        warmup, total = _resolve_scheduler_steps(config, len(job["steps"]))
        self.schedulers = [
            get_linear_schedule_with_warmup(optimizer, warmup, total)
            for optimizer in self.optimizers
        ]
        self.read = ArrowDataset(
            job["max_length"], job["files"], on_missing="raise", hidden_states_dtype=self.dtype
        ).__getitem__
        self.size = max(job["batch_tok"], job["max_length"])
        self.Collate = lambda max_len, dtype: CollateFn(
            max_len, layer.hidden_size, len(job["boundaries"]), dtype, shift_batch
        )

    def step(self, samples: list[dict]) -> float:
        import torch

        size = (
            self.size
            if self.options["pad"]
            else sum(len(sample["input_ids"]) - 1 for sample in samples)
        )
        batch = self.Collate(size, self.dtype)(samples)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            _, loss, _ = self.model(**batch, **self.arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss.detach())

    def state(self) -> dict:
        return {
            name: t
            for name, t in self.model.state_dict().items()
            if not name.startswith("verifier_")
        }

    def forward(self, sample: dict):
        import torch

        batch = self.Collate(len(sample["input_ids"]) - 1, torch.float32)([sample])
        self.model.eval()(**batch, **self.arguments)


def save(peer, sample: dict, path: str) -> None:
    """The trained weights in float32, and what the peer's own forward pass in float32 says on a
    sample: `check.logits` [K, slots, D].
    """
    import torch
    from safetensors.torch import save_file

    weights, logits = {name: t.clone() for name, t in peer.state().items() if t is not None}, []
    head = next(
        module for name, module in peer.model.named_modules() if name.split(".")[-1] == "lm_head"
    )
    hook = head.register_forward_hook(
        lambda module, inputs, output: logits.append(output[0, :CHECK_SLOTS].float().clone())
    )
    with torch.no_grad():
        peer.forward(sample)
    hook.remove()
    weights = {name: t.float() if t.is_floating_point() else t for name, t in weights.items()}
    save_file(
        {
            name: t.contiguous()
            for name, t in (weights | {"check.logits": torch.stack(logits)}).items()
        },
        path,
    )


def main() -> None:
    commands, job = Commands(), json.loads(Path(sys.argv[1]).read_text())
    os.environ["TORCHDYNAMO_DISABLE"] = "0" if job["options"].get("compile") else "1"
    import torch

    torch.set_num_threads(job["threads"])
    torch.set_flush_denormal(
        True
        # as ours does: Adam's moments of rare tokens fade into denormal numbers, which a CPU
        # computes
        # slowly
    )
    torch.manual_seed(job["seed"])
    with contextlib.redirect_stdout(sys.stderr):
        peer = {"specforge": SpecForge, "speculators": Speculators}[job["kind"]](job)
    base, samples, held, step = memory_bytes("VmRSS"), {}, 0, 0
    for row in sorted(
        {row for rows in job["steps"] for row in rows}
    ):  # read beforehand and kept in memory: no step waits for the disk
        samples[row] = {
            name: t.clone() if torch.is_tensor(t) else t for name, t in peer.read(row).items()
        }
        held += sum(t.nbytes for t in samples[row].values() if torch.is_tensor(t))
    gc.collect()
    commands.answer(ready=True)
    while command := commands.next():
        if "steps" in command:
            started, losses = time.perf_counter(), []
            for rows in job["steps"][step : step + command["steps"]]:
                losses.append(peer.step([samples[row] for row in rows]))
            step += len(losses)
            commands.answer(seconds=time.perf_counter() - started, losses=losses)
        elif "memory" in command:
            commands.answer(base=base, held=held, peak=memory_bytes("VmHWM"))
        else:
            save(peer, samples[command["row"]], command["save"])
            commands.answer(saved=command["save"])


if __name__ == "__main__":
    main()
