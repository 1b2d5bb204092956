"""Weights in eight bits, for generation: with few rows, its time is that of reading them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.baselines import RelativeBlock
from perceiver_ar.decoder import Decoder
from perceiver_ar.layers import Linear
from perceiver_ar.model import Block


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
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


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
