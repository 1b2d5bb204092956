"""Eight-bit weights for generation, whose time, with few rows, is that of reading the weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.baselines import RelativeBlock
from perceiver_ar.decoder import Decoder
from perceiver_ar.layers import Linear
from perceiver_ar.model import Block

_FEW = 16
"""Rows up to which a CPU is faster if weights are not converted back to floats before the product."""


class Int8Linear(nn.Module):
    """A linear map with int8 weights from -127 to 127 and one scale per output."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # Integers of this size are exact in bf16, so nothing is lost before the scale.
        y = self._of_few(x) if self._is_few(x) else F.linear(x, self.weight.to(x.dtype))
        y = y * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _is_few(self, x: Tensor) -> bool:
        """Whether the int8 product is faster, and safe: it crashes at some widths."""
        few = x.numel() <= _FEW * self.in_features and self.in_features % 32 == 0
        return few and x.device.type == "cpu" and x.dtype != torch.float64

    def _of_few(self, x: Tensor) -> Tensor:
        """Torch's own product of bf16 inputs and int8 weights, which reads a quarter of the bytes."""
        ones = torch.ones(self.out_features, dtype=torch.bfloat16)  # not the scale: bf16 would round it
        y = torch._weight_int8pack_mm(x.flatten(0, -2).bfloat16(), self.weight, ones)
        return y.view(*x.shape[:-1], -1)


def quantize(model: Decoder) -> Decoder:
    """Converts the weights of the model's blocks to int8, in place; to be called last, after any cast.

    Embeddings, layer norms and the output are unchanged. The model can then no longer be trained or saved.
    """
    for block in model.modules():
        if isinstance(block, Block | RelativeBlock):
            for parent in list(block.modules()):
                for name, child in parent.named_children():
                    if isinstance(child, Linear):
                        setattr(parent, name, Int8Linear(child))
    return model.eval()
