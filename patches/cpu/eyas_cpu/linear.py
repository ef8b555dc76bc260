"""Products of a few tokens with a weight matrix, in bfloat16.

`F.linear` lays the whole weight out anew for its kernel at each call, which for a handful of tokens takes longer than the product. The other way
round, weight @ tokens^T, it is the tokens that are laid out: the same bits for 2 to 32 tokens, in two thirds of the time (one core, SmolLM2's shapes).
A decode batch, a verify step and a draft are that small; a prefill is not, and goes SGLang's way.
"""

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

MOST_TOK = 32


class FewTokens(UnquantizedLinearMethod):
    def apply(self, layer, x, bias=None):
        if (
            bias is not None
            or x.dtype != torch.bfloat16
            or x.dim() != 2
            or not 0 < len(x) <= MOST_TOK
        ):
            return super().apply(layer, x, bias)
        if len(x) == 1:
            return torch.mv(layer.weight, x[0])[None]
        return torch.mm(layer.weight, x.t()).t().contiguous()


def use_in(model: torch.nn.Module) -> None:
    """In every linear layer of a loaded model that is not quantised."""
    method = FewTokens()
    for module in model.modules():
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
            module.quant_method = method
