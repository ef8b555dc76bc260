"""Several processes that train one drafter: DDP or FSDP2.

DDP has a copy of the weights in each process. FSDP2 shards weights, gradients and optimizer.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m eyas train --profile demo

torchrun sets the environment that says which process this is. Without it there is one rank, and
every function here is the identity. Gradients are summed.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def group(device: torch.device):
    """Keep the process group for as long as training lasts."""
    if WORLD == 1:
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrap(module: nn.Module, kind: str, device: torch.device) -> nn.Module:
    """Wrap a module for `kind` ddp or fsdp. What needs no gradient stays whole on every rank."""
    if WORLD == 1:
        return module
    if kind == "fsdp":
        frozen = {p for p in module.parameters() if not p.requires_grad}
        return fully_shard(
            module, mesh=dist.init_device_mesh(device.type, (WORLD,)), ignored_params=frozen
        )
    return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)


@contextlib.contextmanager
def gradients(module: nn.Module, summed: bool):
    """Say whether a backward pass in this block ends with gradients summed over the ranks.

    Only the last pass of an optimizer step has to.
    """
    if isinstance(module, DistributedDataParallel):
        with contextlib.nullcontext() if summed else module.no_sync():
            yield
    elif hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(summed)
        yield
    else:
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, of which each rank may hold a part. Every rank has to ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor laid out over the ranks as `like`."""
    tensor = tensor.to(like.device)
    return (
        distribute_tensor(tensor, like.device_mesh, like.placements)
        if isinstance(like, DTensor)
        else tensor
    )


def total(values: list[float]) -> list[float]:
    """Return the sums of these values over all ranks."""
    if WORLD == 1:
        return values
    tensor = torch.tensor(
        values, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu"
    )
    dist.all_reduce(tensor)
    return tensor.tolist()
