"""The parts of the drafter's layer, each with its gradient."""

import torch
import torch.nn.functional as F

ROWS = 64  # what numbers of rows are rounded up to


def filled(x: torch.Tensor) -> torch.Tensor:
    """[n, ...] with rows of zeros up to a multiple of ROWS where the number of rows costs a new kernel: bfloat16 on a CPU."""
    missing = -len(x) % ROWS if x.dtype == torch.bfloat16 and x.device.type == "cpu" else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, in] by weight [out, in] -> [n, out]. The gradient by x is the product with the weight turned."""
    return (filled(x) @ weight.T)[: len(x)]


def weight_product(grads: list[torch.Tensor], xs: list[torch.Tensor]) -> torch.Tensor:
    """The gradient [out, in] of a weight over all its rows: [n, out] and [n, in] of each part."""
    grad, x = (filled(torch.cat(parts) if len(parts) > 1 else parts[0]) for parts in (grads, xs))
    return grad.T @ x


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, low: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x [n, H] in `low`, and what x was multiplied by, [n, 1]."""
    scale = (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        .square_()
        .div_(x.shape[-1])
        .add_(eps)
        .rsqrt_()
    )
    return (x * scale).mul_(weight).to(low), scale


def norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(by x, by weight) of `norm`."""
    grad, normed = grad.to(x.dtype), x * scale
    along = grad * normed
    dot = torch.mv(along, weight)[:, None].div_(-x.shape[-1])
    return (grad * weight).addcmul_(normed, dot).mul_(scale), along.sum(0)


def rotary_tables(config, n: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions 0 .. n-1, [n, 1, head_dim / 2], in the dtype and on the device of `like`."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(
        torch.arange(half, dtype=like.dtype, device=like.device) / half
    )
    angles = torch.arange(n, dtype=like.dtype, device=like.device)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in Llama's (neox) form of x [n, heads, head_dim] by tables [n, 1, head_dim / 2]; with -sin its gradient."""
    a, b = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    left, right = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right).addcmul_(a, sin)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [n, 2I], both halves in one tensor."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_gradient(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    of_gate, of_up = out.chunk(2, dim=-1)
    of_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    torch.mul(F.silu(gate), grad, out=of_up)
    return out
