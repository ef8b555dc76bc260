"""Parts of the drafter's layer as the fast training pass needs them, and their gradients.

The RMSNorm and RoPE themselves are `rms_norm` and `apply_rope` of `eyas.models.drafter`.
"""

import torch
import torch.nn.functional as F

ROWS = 64  # what numbers of rows are rounded up to


def filled(x: torch.Tensor) -> torch.Tensor:
    """Return x [n, ...], with rows of zeros up to a multiple of ROWS for bfloat16 on a CPU.

    There every new number of rows costs the compilation of a kernel.
    """
    missing = -len(x) % ROWS if x.dtype == torch.bfloat16 and x.device.type == "cpu" else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product [n, out] of x [n, in] and weight [out, in].

    The gradient by x is the product with the transposed weight.
    """
    return (filled(x) @ weight.T)[: len(x)]


def weight_product(grads: list[torch.Tensor], xs: list[torch.Tensor]) -> torch.Tensor:
    """Return the gradient [out, in] of a weight, from [n, out] and [n, in] of each part."""
    grad, x = (filled(torch.cat(parts) if len(parts) > 1 else parts[0]) for parts in (grads, xs))
    return grad.T @ x


def norm_gradient(
    grad: torch.Tensor,  # [n, H], by the output
    x: torch.Tensor,  # [n, H]
    weight: torch.Tensor,  # [H]
    scale: torch.Tensor,  # [n, 1], as `rms_norm` returns it
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `rms_norm` by x [n, H] and by the weight [H]."""
    grad, normed = grad.to(x.dtype), x * scale
    along = grad * normed
    dot = torch.mv(along, weight)[:, None].div_(-x.shape[-1])
    return (grad * weight).addcmul_(normed, dot).mul_(scale), along.sum(0)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [n, I], of both halves in one tensor [n, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_gradient(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `swiglu` by both halves, [n, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    of_gate, of_up = out.chunk(2, dim=-1)
    of_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    torch.mul(F.silu(gate), grad, out=of_up)
    return out
