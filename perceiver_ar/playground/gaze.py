"""How far back the cross-attention looks for a token, as a picture over the whole context.

Letters: T inputs, H heads, W columns of the picture.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perceiver_ar.model import PerceiverAR
from perceiver_ar.playground.html import picture

WIDTH = 768
"""Most columns; one that several inputs share shows the largest of their weights."""


@torch.inference_mode()
def gaze(model: PerceiverAR, tokens: Tensor, positions: Tensor | None, number: int) -> Tensor:
    """Cross-attention weights (H, T) of the last input, as latent `number`, over all inputs (1, T)."""
    places = model.place(tokens, positions, None)
    inputs, cross = model.embedding(tokens, places), model.cross_attend
    z = model.queries(inputs[:, -1:], torch.tensor([[number]], device=tokens.device))
    q = cross.ask(cross.norm(z), model.cross_turn(places[:, -1:]))  # (1, H, 1, K)
    k, _ = cross.keys_values(inputs, model.cross_turn(places))
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.softmax(-1)[0, :, 0]


def explained(weights: NDArray[np.float32]) -> str:
    """Weights (H, T) as a picture, one row per head, with a caption."""
    heads, inputs = weights.shape
    mean = weights.mean(0)
    from_now = np.cumsum(mean[::-1])
    half, most = (int(np.searchsorted(from_now, share)) + 1 for share in (0.5, 0.9))
    columns = min(inputs, WIDTH)
    bins = np.arange(columns) * inputs // columns
    seen = np.maximum.reduceat(weights, bins, axis=1)  # (H, W)
    # The fourth root makes small weights visible too.
    level = (seen / seen.max(axis=1, keepdims=True)) ** 0.25
    paper, ink = np.array([247, 247, 252.0]), np.array([67, 56, 202.0])
    pixels = (paper + level[..., None] * (ink - paper)).astype(np.uint8)
    tall = np.repeat(pixels, max(4, 128 // heads), axis=0)
    return (
        f"{picture(tall, 'attention by head over the context', 'strip')}"
        f"<div class=ends><span>{inputs:,} tokens back</span><span>now</span></div>"
        f"<p>Half of what this token takes in lies within the last {min(half, inputs):,} inputs, nine tenths "
        f"within {min(most, inputs):,} of {inputs:,}. Each row is a head of the cross-attend, its strongest "
        f"input the darkest; the shade is the fourth root of the share, so that faint glances show.</p>"
    )
