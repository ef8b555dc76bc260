"""Runs SGLang's own LlamaForCausalLMEagle3 on an export, in a process of its own (SGLang keeps
process-wide state).

    python tests/helpers/sglang_drafter.py EXPORT_FOLDER INPUTS.safetensors OUTPUTS.safetensors

Inputs: `embedding` [V, H] of the target, `token_ids` [n + 1], `states` [n, B*H]. The first n tokens
are run in one pass with the states
(draft extend), the last one after them with the hidden state that came out last (a draft step).
Outputs: `hidden` [n + 1, H] that SGLang feeds back, `logits` [n + 1, D], `hot_token_id` [D]; prints
the names of the parameters that the loader
left alone, as JSON. Everything is SGLang's: config path, model class, weight loader, layers, KV
pool, torch_native attention. The
platform is this repository's plain CPU one.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches" / "cpu"))
import sglang.srt.platforms

from eyas_cpu.platform import PlainCpuPlatform

sglang.srt.platforms._current_platform = PlainCpuPlatform()  # before anything that asks for it

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


@torch.inference_mode()
def main(folder: str, inputs: str, outputs: str) -> None:
    args = ServerArgs(
        model_path=folder,
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        skip_tokenizer_init=True,
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"file://{tempfile.mktemp()}",
    )
    initialize_model_parallel()
    config = ModelConfig.from_server_args(args, model_path=folder, is_draft_model=True)
    model_class, _ = get_model_architecture(config)
    torch.set_default_dtype(torch.float32)
    model = model_class(config.hf_config)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    model.load_weights(load_file(Path(folder) / "model.safetensors").items())
    untouched = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    given = load_file(inputs)
    model.set_embed(
        torch.nn.Parameter(given["embedding"], requires_grad=False)
    )  # as SGLang's EAGLE worker does

    n = len(given["states"])
    attention = model.model.layers[0].self_attn
    requests = ReqToTokenPool(
        size=1, max_context_len=n + 1, device="cpu", enable_memory_saver=False
    )
    cache = MHATokenToKVPool(
        size=n + 1,
        page_size=1,
        dtype=torch.float32,
        head_num=attention.num_kv_heads,
        head_dim=attention.head_dim,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    slots = torch.arange(1, n + 2)  # slot 0 is the pool's padding
    requests.req_to_token[1] = slots.int()
    backend = TorchNativeAttnBackend(
        SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=cache)
    )

    def forward(
        mode: ForwardMode, start: int, end: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=given["token_ids"][start:end],
            positions=torch.arange(start, end),
            seq_lens=torch.tensor([end]),
            seq_lens_sum=end,
            req_pool_indices=torch.tensor([1]),
            out_cache_loc=slots[start:end],
            spec_info=SimpleNamespace(hidden_states=states),
            extend_seq_lens=torch.tensor([end - start]),
            extend_prefix_lens=torch.tensor([start]),
            extend_seq_lens_cpu=[end - start],
            extend_prefix_lens_cpu=[start],
        )
        backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=backend)):
            normed, (hidden,) = model.model(batch.input_ids, batch.positions, batch)
        return hidden, model.logits_processor._get_logits(normed, model.lm_head, batch)

    hidden, logits = forward(ForwardMode.EXTEND, 0, n, given["states"])
    hidden_next, logits_next = forward(ForwardMode.DECODE, n, n + 1, hidden[-1:])
    results = {
        "hidden": torch.cat([hidden, hidden_next]),
        "logits": torch.cat([logits, logits_next]),
        "hot_token_id": model.hot_token_id,
    }
    save_file(results, outputs)
    print(
        json.dumps(
            {"class": f"{model_class.__module__}.{model_class.__name__}", "untouched": untouched}
        )
    )


main(*sys.argv[1:])
