"""Multiply a few tokens with a weight matrix, in bfloat16.

`F.linear` rearranges the whole weight for its kernel at each call. For a handful of tokens that
takes longer than the product. In weight @ tokens^T the tokens are rearranged instead: the same bits
for 2 to 32 tokens, in two thirds of the time (one core, SmolLM2's shapes). A decode batch, a
verify step and a draft are that small. A prefill is not, and takes SGLang's own way.
"""

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

MOST_TOK = 32


class FewTokens(UnquantizedLinearMethod):
    """Replace SGLang's linear layer for at most MOST_TOK tokens."""

    def apply(self, layer, x, bias=None):
        few = x.dim() == 2 and 0 < len(x) <= MOST_TOK
        if bias is not None or x.dtype != torch.bfloat16 or not few:
            return super().apply(layer, x, bias)
        if len(x) == 1:
            return torch.mv(layer.weight, x[0])[None]
        return torch.mm(layer.weight, x.t()).t().contiguous()


def use_in(model: torch.nn.Module) -> None:
    """Use it in every linear layer of a loaded model that is not quantised."""
    method = FewTokens()
    for module in model.modules():
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
            module.quant_method = method
