"""Weights in eight bits, for generation: with few rows, its time is that of reading them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.baselines import RelativeBlock
from perceiver_ar.decoder import Decoder
from perceiver_ar.layers import Linear
from perceiver_ar.model import Block

_FEW = 16
"""Rows up to which a CPU is faster if weights are not turned back into floats before the product."""


class Int8Linear(nn.Module):
    """A linear map whose weights are whole numbers from -127 to 127, times one scale for each output."""

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
        # Such whole numbers are exact in bf16, so nothing is lost before the scale.
        y = self._of_few(x) if self._is_few(x) else F.linear(x, self.weight.to(x.dtype))
        y = y * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _is_few(self, x: Tensor) -> bool:
        """Whether the product below can be taken, which crashes at odd widths, and is worth it."""
        few = x.numel() <= _FEW * self.in_features and self.in_features % 32 == 0
        return few and x.device.type == "cpu" and x.dtype != torch.float64

    def _of_few(self, x: Tensor) -> Tensor:
        """By torch's own product of bf16 and eight bits: a quarter of the bytes are read."""
        ones = torch.ones(self.out_features, dtype=torch.bfloat16)  # the scale would lose digits there
        y = torch._weight_int8pack_mm(x.flatten(0, -2).bfloat16(), self.weight, ones)
        return y.view(*x.shape[:-1], -1)


def quantize(model: Decoder) -> Decoder:
    """The same model with the weights of its blocks in eight bits; to be done last, after any cast.

    Embeddings, layer norms and the output stay as they are. It cannot be trained or saved any more.
    """
    for block in model.modules():
        if isinstance(block, Block | RelativeBlock):
            for parent in list(block.modules()):
                for name, child in parent.named_children():
                    if isinstance(child, Linear):
                        setattr(parent, name, Int8Linear(child))
    return model.eval()
