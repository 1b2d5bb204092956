"""One latent's way through a block in a few Triton kernels: the fast twin of caching.through.

A step of generation reads all weights and the cache once, and computes little with them: its time is
that of reading, and of waiting for the kernel before. So what lies between two products is computed on
the way, only those keys are read that are there yet, and a kernel fetches what it can, and computes
what it can with that, while the one before it still runs (programmatic dependent launch). That is
safe for what has lain there since before the step: weights, and all keys and values but the newest.

Letters: B batch, C channels, E input width, H heads, K head width, N keys, O outputs, I inputs of a
linear map, S stretches of keys, or parts of a linear map's inputs.
"""

import math

import torch
import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # ty: ignore[import-not-found]

from perceiver_ar.model import Block, Turns
from perceiver_ar.quantized import Int8Linear

_NOTHING = tl.constexpr(-1e30)
"""A score that no key has."""
_PROGRAMS = 256
"""About as many as a GPU can run at once with two kernels on each of its processors."""


def serves(block: Block) -> bool:
    """Whether the kernels can take this block: its heads must be powers of two wide."""
    device = block.query.weight.device
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    head = block.query.out_features // block.heads
    widest = max(block.norm.normalized_shape[0], block.query.out_features)
    return head >= 16 and head & (head - 1) == 0 and widest <= 4096


def through(
    block: Block,
    z: Tensor,
    inputs: Tensor | None,
    turns: Turns,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    visible: Tensor | None,
) -> Tensor:
    """One latent (B, 1, C) through a block; its key and value are put in their place among the others."""
    several = len(z) > 1
    normal, source = z, inputs
    if several:  # a single row is normalized on the way
        normal = _settle(z, norm=block.norm)[1]
        source = None if inputs is None else _settle(inputs, norm=block.input_norm)[1]
    query = _project(block, normal, source, turns, keys, values, place)
    parts, scale = _attend(query, keys, values, place, visible)
    if not several:
        z = _linear(block.out, parts, residual=z, scale=scale)
        hidden = _linear(block.mlp.widen, z, norm=block.mlp_norm, squared=True)
        return _linear(block.mlp.narrow, hidden, residual=z)
    if parts.shape[2] > 1:
        parts = (scale.softmax(-1)[..., None] * parts).sum(2, keepdim=True).to(z.dtype)
    z, normal = _settle(z, _linear(block.out, parts, split=True), block.out, block.mlp_norm)
    hidden = _linear(block.mlp.widen, normal, squared=True)
    return _settle(z, _linear(block.mlp.narrow, hidden, split=True), block.mlp.narrow)[0]


def _early(x: Tensor) -> dict[str, bool]:
    """Whether a kernel may be launched before the one before it ends."""
    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": early}


def _blocks(x: Tensor, inputs: int, outputs: int) -> dict[str, int]:
    """How much of a product one program does: for a single row all inputs of a few outputs."""
    if len(x) == 1:
        each = triton.next_power_of_2(max(2, outputs // _PROGRAMS))
        wide = min(4096, triton.next_power_of_2(inputs))
        return {"ROWS": 1, "OUT": each, "IN": wide, "num_warps": min(16, max(4, each * wide // 4096))}
    rows = min(64, max(16, triton.next_power_of_2(len(x))))
    read = (512 if _early(x)["EARLY"] else 256) // x.element_size()  # as shared memory allows
    return {"ROWS": rows, "OUT": 32, "IN": read, "num_warps": 4, "num_stages": 3}


def _splits(rows: int, inputs: int, outputs: int, blocks: dict[str, int]) -> int:
    """Into how many parts the inputs of a product are cut, so that there are enough programs."""
    programs = triton.cdiv(rows, blocks["ROWS"]) * triton.cdiv(outputs, blocks["OUT"])
    return max(1, min(triton.cdiv(inputs, blocks["IN"]), _PROGRAMS // 2 // programs))


def _stretches(keys: Tensor) -> tuple[int, dict[str, int]]:
    """Into how many stretches keys (B, H, N, K) are cut, and how they are read.

    Few heads fetch their first keys before they wait (no stages). Many read ahead, each the less the
    more there are.
    """
    heads, most = keys.shape[0] * keys.shape[1], keys.shape[2]
    if heads < _PROGRAMS:
        return min(16 if most > 4096 else 8, _PROGRAMS // heads), {"KEYS": 64, "STAGES": 0, "num_warps": 4}
    fit = 16384 // (keys.shape[3] * keys.element_size())
    lanes = min(128, fit, triton.next_power_of_2(max(32, 128 * _PROGRAMS // heads)))
    return 1, {"KEYS": lanes, "STAGES": 3, "num_warps": max(2, lanes // 32)}


def _grid(rows: int, outputs: int, blocks: dict[str, int], maps: int = 1) -> tuple[int, int, int]:
    return triton.cdiv(outputs, blocks["OUT"]), maps, triton.cdiv(rows, blocks["ROWS"])


def _vectors(norm: nn.LayerNorm | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if norm is None else (norm.weight, norm.bias)


def _weights(linear: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, what each output's are to be multiplied by where they have eight bits, and biases."""
    assert isinstance(linear, nn.Linear | Int8Linear)
    scale = linear.scale if isinstance(linear, Int8Linear) else linear.weight
    return linear.weight, scale, linear.bias


def _project(
    block: Block, z: Tensor, inputs: Tensor | None, turns: Turns, keys: Tensor, values: Tensor, place: Tensor
) -> Tensor:
    """Queries (B, 1, E); the key and the value go to their place in (B, H, N, K)."""
    assert keys.stride() == values.stride()
    rows, width, head = len(z), block.query.out_features, keys.shape[-1]
    source = z if inputs is None else inputs
    norm = block.norm if rows == 1 else None
    source_norm = norm if norm is None or inputs is None else block.input_norm
    query = z.new_empty(rows, 1, width)
    own, other = turns[0] or (query, query)
    blocks = _blocks(z, max(z.shape[-1], source.shape[-1]), 3 * width)
    _project_kernel[_grid(rows, width, blocks, maps=3)](
        z, source, *_vectors(norm, z), *_vectors(source_norm, source),
        *_weights(block.query), *_weights(block.key), *_weights(block.value), own, other,
        own.stride(0) if len(own) > 1 else 0, query, keys, values, place, *keys.stride()[:3], block.norm.eps,
        B=rows, C=z.shape[-1], E=source.shape[-1], WIDTH=width, HEAD=head,
        SCALED=isinstance(block.query, Int8Linear), NORM=norm is not None, TURNED=turns[0] is not None,
        **_early(z), **blocks,
    )  # fmt: skip
    return query


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, place: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What each stretch of the keys gives alone, (B, H, S, K), and the log-sum-exps to weigh them by."""
    rows, heads, _, width = keys.shape
    stretches, lanes = _stretches(keys)
    kind = query.dtype if stretches == 1 else torch.float32
    parts = query.new_empty(rows, heads, stretches, width, dtype=kind)
    scale = query.new_empty(rows, heads, stretches, dtype=torch.float32)
    _attend_kernel[(rows * heads, stretches)](
        query, keys, values, place, place if visible is None else visible, parts, scale,
        *keys.stride()[:3], heads, stretches, 1 / math.sqrt(width),
        0 if visible is None else visible.stride(0), MASKED=visible is not None, WIDTH=width,
        **_early(query), **lanes,
    )  # fmt: skip
    return parts, scale


def _linear(
    linear: nn.Module,
    x: Tensor,
    *,
    norm: nn.LayerNorm | None = None,
    squared: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    split: bool = False,
) -> Tensor:
    """A linear map of x (B, 1, I), or of what stretches of keys gave, as the scale weighs them.

    split: its sums over parts of the inputs, (S, B, O), to which no bias is added yet.
    """
    weight, of_weight, bias = _weights(linear)
    outputs, inputs = weight.shape
    rows = len(x)
    stretches, head = (1, 1) if scale is None else x.shape[2:]
    blocks = _blocks(x, inputs, outputs)
    splits, out = 1, bias.new_empty(rows, 1, outputs)
    if split:
        splits = _splits(rows, inputs, outputs, blocks)
        out = bias.new_empty(splits, rows, outputs, dtype=torch.float32)
    _linear_kernel[_grid(rows, outputs, blocks, maps=splits)](
        x, bias if scale is None else scale, *_vectors(norm, bias), weight, of_weight, bias,
        bias if residual is None else residual, out, 0.0 if norm is None else norm.eps,
        B=rows, INPUTS=inputs, WIDTH=outputs, HEAD=head, SCALED=isinstance(linear, Int8Linear),
        NORM=norm is not None, MERGED=stretches > 1, SQUARED=squared, ADDED=residual is not None,
        SPLIT=split, STRETCHES=stretches, **_early(x), **blocks,
    )  # fmt: skip
    return out


def _settle(
    z: Tensor, parts: Tensor | None = None, linear: nn.Module | None = None, norm: nn.LayerNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Latents (B, 1, C) with the sums of a linear map added, (S, B, C), and those behind a layer norm."""
    rows, _, width = z.shape
    out, normal = z if parts is None else torch.empty_like(z), torch.empty_like(z)
    bias = z if linear is None else _weights(linear)[2]
    _settle_kernel[(rows,)](
        z, z if parts is None else parts, bias, *_vectors(norm, z), out, normal,
        0.0 if norm is None else norm.eps, rows, width, SPLITS=0 if parts is None else len(parts),
        NORM=norm is not None, CHANNELS=triton.next_power_of_2(width), num_warps=4, **_early(z),
    )  # fmt: skip
    return out, normal


@triton.jit
def _read(
    x, scale, i, INPUTS: tl.constexpr, HEAD: tl.constexpr, MERGED: tl.constexpr, STRETCHES: tl.constexpr
):
    """A single row's inputs, (1, IN): as they are, or what all stretches of the keys give together."""
    there = i < INPUTS
    if MERGED:
        at = i // HEAD * STRETCHES
        top = tl.load(scale + at, mask=there, other=0.0)
        for s in tl.static_range(1, STRETCHES):
            top = tl.maximum(top, tl.load(scale + at + s, mask=there, other=0.0))
        total = tl.zeros_like(top)
        read = tl.zeros_like(top)
        for s in tl.static_range(STRETCHES):
            weight = tl.exp(tl.load(scale + at + s, mask=there, other=0.0) - top)
            total += weight
            read += weight * tl.load(x + (at + s) * HEAD + i % HEAD, mask=there, other=0.0)
        read = read / total
    else:
        read = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    return read


@triton.jit
def _fetch(
    gain, base, weight, of_weight, bias, o, INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """What does not depend on the kernel before, and so can be read while that runs.

    For a single row, these are its weights, too, (OUT, IN), and those of the layer norm before it.
    """
    known = o < WIDTH
    shift = tl.load(bias + o, mask=known, other=0.0).to(tl.float32)
    factor = tl.load(of_weight + o, mask=known, other=0.0) if SCALED else shift
    w, gains, bases = shift, shift, shift
    if ROWS == 1:
        i = tl.arange(0, IN)[None, :]
        w = tl.load(weight + o[:, None] * INPUTS + i, mask=known[:, None] & (i < INPUTS), other=0.0)
        if NORM:
            gains = tl.load(gain + i, mask=i < INPUTS, other=0.0).to(tl.float32)
            bases = tl.load(base + i, mask=i < INPUTS, other=0.0).to(tl.float32)
    return w, gains, bases, factor, shift


@triton.jit
def _product(
    x, scale, weight, fetched, eps, row, o, begin, end,
    B: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, MERGED: tl.constexpr, STRETCHES: tl.constexpr, SPLIT: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """(ROWS, OUT) of a linear map, perhaps behind a layer norm; of some of its inputs, if it is split."""
    w, gains, bases, factor, shift = fetched
    i = tl.arange(0, IN)[None, :]
    known = (o < WIDTH)[:, None]
    if ROWS == 1:
        read = _read(x, scale, i, INPUTS, HEAD, MERGED, STRETCHES)
        if NORM:
            mean = tl.sum(read) / INPUTS
            spread = tl.rsqrt(tl.sum(read * read) / INPUTS - mean * mean + eps)
            read = (read - mean) * spread * gains + bases
        one = tl.sum(w.to(tl.float32) * read, 1)
        for start in range(IN, INPUTS, IN):
            more = tl.load(
                weight + o[:, None] * INPUTS + start + i, mask=known & (start + i < INPUTS), other=0.0
            )
            further = _read(x, scale, start + i, INPUTS, HEAD, MERGED, STRETCHES)
            one += tl.sum(more.to(tl.float32) * further, 1)
        total = one[None, :]
    else:
        total = tl.zeros((ROWS, OUT), tl.float32)
        for start in range(begin, end, IN):
            there = start + i < INPUTS
            more = tl.load(weight + o[:, None] * INPUTS + start + i, mask=known & there, other=0.0)
            further = tl.load(x + row * INPUTS + start + i, mask=(row < B) & there, other=0.0)
            # Whole numbers of eight bits are exact in sixteen.
            total = tl.dot(further.to(KIND), tl.trans(more.to(KIND)), total, input_precision="ieee")
    if SCALED:
        total = total * factor[None, :]
    return total if SPLIT else total + shift[None, :]


@triton.jit
def _linear_kernel(
    x, scale, gain, base, weight, of_weight, bias, residual, out, eps,
    B: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, MERGED: tl.constexpr, SQUARED: tl.constexpr, ADDED: tl.constexpr,
    SPLIT: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """A few outputs of a linear map, with what comes before and after it."""
    if EARLY:
        gdc_launch_dependents()
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    at, written = row * WIDTH + o[None, :], (row < B) & (o[None, :] < WIDTH)
    fetched = _fetch(gain, base, weight, of_weight, bias, o, INPUTS, WIDTH, SCALED, NORM, ROWS, IN)
    if EARLY:
        gdc_wait()
    if ADDED:
        added = tl.load(residual + at, mask=written, other=0.0).to(tl.float32)
    each = tl.cdiv(tl.cdiv(INPUTS, tl.num_programs(1)), IN) * IN
    begin = tl.program_id(1) * each
    total = _product(
        x, scale, weight, fetched, eps, row, o, begin, tl.minimum(begin + each, INPUTS), B, INPUTS, WIDTH,
        HEAD, SCALED, NORM, MERGED, STRETCHES, SPLIT, bias.dtype.element_ty, ROWS, OUT, IN,
    )  # fmt: skip
    if SQUARED:
        total = tl.maximum(total, 0.0)
        total = total * total
    if ADDED:
        total += added
    if SPLIT:
        at += tl.program_id(1) * B * WIDTH
    tl.store(out + at, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def _settle_kernel(
    z, parts, bias, gain, base, out, normal, eps, rows, width,
    SPLITS: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One row: adds what parts of a product and its bias give, then a layer norm."""
    if EARLY:
        gdc_launch_dependents()
    row, c = tl.program_id(0), tl.arange(0, CHANNELS)
    there = c < width
    if SPLITS:
        shift = tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + c, mask=there, other=0.0).to(tl.float32)
        bases = tl.load(base + c, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    kind: tl.constexpr = out.dtype.element_ty
    x = tl.load(z + row * width + c, mask=there, other=0.0).to(tl.float32)
    if SPLITS:
        for s in tl.static_range(SPLITS):
            shift += tl.load(parts + (s * rows + row) * width + c, mask=there, other=0.0)
        x = (x + shift).to(kind)
        tl.store(out + row * width + c, x, mask=there)
        x = x.to(tl.float32)
    if NORM:
        mean = tl.sum(x) / width
        spread = tl.rsqrt(tl.sum(x * x) / width - mean * mean + eps)
        tl.store(normal + row * width + c, ((x - mean) * spread * gains + bases).to(kind), mask=there)


@triton.jit
def _project_kernel(
    latents, source, latents_gain, latents_base, source_gain, source_base,
    query_weight, of_query, query_bias, key_weight, of_key, key_bias, value_weight, of_value, value_bias,
    own, other, turn_stride, query, keys, values, place, row_stride, head_stride, key_stride,
    eps, B: tl.constexpr, C: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, TURNED: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """A few channels of the query, the key or the value."""
    if EARLY:
        gdc_launch_dependents()
    which = tl.program_id(1)
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row, channel = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None], o[None, :]
    written = (row < B) & (channel < WIDTH)
    kind: tl.constexpr = query.dtype.element_ty
    to = row.to(tl.int64) * row_stride + channel // HEAD * head_stride + channel % HEAD
    to += tl.load(place) * key_stride
    turn = row * turn_stride + channel % HEAD
    factors = (0.0, 0.0)
    if TURNED:
        factors = tl.load(own + turn, mask=written, other=0.0), tl.load(other + turn, mask=written, other=0.0)
    if which == 0:
        fetched = _fetch(
            latents_gain, latents_base, query_weight, of_query, query_bias, o,
            C, WIDTH, SCALED, NORM, ROWS, IN,
        )  # fmt: skip
        if EARLY:
            gdc_wait()
        y = _product(
            latents, latents, query_weight, fetched, eps, row, o, 0, C,
            B, C, WIDTH, 1, SCALED, NORM, False, 1, False, kind, ROWS, OUT, IN,
        )  # fmt: skip
        y = _turn(y, factors, TURNED, ROWS, OUT)
        tl.store(query + row * WIDTH + channel, y.to(kind), mask=written)
    elif which == 1:
        fetched = _fetch(
            source_gain, source_base, key_weight, of_key, key_bias, o,
            E, WIDTH, SCALED, NORM, ROWS, IN,
        )  # fmt: skip
        if EARLY:
            gdc_wait()
        y = _product(
            source, source, key_weight, fetched, eps, row, o, 0, E,
            B, E, WIDTH, 1, SCALED, NORM, False, 1, False, kind, ROWS, OUT, IN,
        )  # fmt: skip
        y = _turn(y, factors, TURNED, ROWS, OUT)
        tl.store(keys + to, y.to(kind), mask=written)
    else:
        fetched = _fetch(
            source_gain, source_base, value_weight, of_value, value_bias, o,
            E, WIDTH, SCALED, NORM, ROWS, IN,
        )  # fmt: skip
        if EARLY:
            gdc_wait()
        y = _product(
            source, source, value_weight, fetched, eps, row, o, 0, E,
            B, E, WIDTH, 1, SCALED, NORM, False, 1, False, kind, ROWS, OUT, IN,
        )  # fmt: skip
        tl.store(values + to, y.to(kind), mask=written)


@triton.jit
def _turn(y, factors, TURNED: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr):
    """Rotary positions: each channel times one factor, plus the other of its pair times another."""
    if TURNED:
        a, b = tl.split(tl.reshape(y, (ROWS, OUT // 2, 2)))
        y = y * factors[0] + tl.reshape(tl.join(b, a), (ROWS, OUT)) * factors[1]
    return y


@triton.jit
def _take(top, total, out, q, k, v, key, end, shows, MASKED: tl.constexpr):
    """Each lane's softmax with one more key and value."""
    shown = key < end
    if MASKED:
        shown = shown & (tl.load(shows + key, mask=shown, other=0) != 0)
    score = tl.where(shown, tl.sum(k.to(tl.float32) * q[None, :], 1), _NOTHING)
    higher = tl.maximum(top, score)
    weight, before = tl.where(shown, tl.exp(score - higher), 0.0), tl.exp(top - higher)
    return higher, total * before + weight, out * before[:, None] + weight[:, None] * v.to(tl.float32)


@triton.jit
def _attend_kernel(
    query, keys, values, place, visible, parts, scale,
    row_stride, head_stride, key_stride, heads, stretches, factor, visible_stride,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row over a stretch of the keys, of which the newest was written by the kernel before.

    Each of KEYS lanes has a softmax of its own, over every so many keys; they are merged at the end.
    """
    if EARLY:
        gdc_launch_dependents()
    row, head, stretch = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    lane, channel = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    newest = tl.load(place)
    count = newest.to(tl.int32)
    each = tl.cdiv(count, stretches)
    begin = stretch * each
    end = tl.minimum(begin + each, count)
    keys += row.to(tl.int64) * row_stride + head * head_stride + channel
    values += row.to(tl.int64) * row_stride + head * head_stride + channel
    if not STAGES:
        key = begin + lane
        at = key[:, None].to(tl.int64) * key_stride
        k = tl.load(keys[None, :] + at, mask=(key < end)[:, None], other=0.0)
        v = tl.load(values[None, :] + at, mask=(key < end)[:, None], other=0.0)
    if EARLY:
        gdc_wait()
    q = tl.load(query + tl.program_id(0) * WIDTH + channel).to(tl.float32) * factor
    first = (lane == 0) & (stretch == 0)  # takes the newest
    top = tl.where(first, tl.sum(q * tl.load(keys + newest * key_stride).to(tl.float32)), _NOTHING)
    total = tl.where(first, 1.0, 0.0)
    out = tl.where(first[:, None], tl.load(values + newest * key_stride).to(tl.float32)[None, :], 0.0)
    shows = visible + row * visible_stride
    if STAGES:
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            key = start + lane
            at = key[:, None].to(tl.int64) * key_stride
            k = tl.load(keys[None, :] + at, mask=(key < end)[:, None], other=0.0)
            v = tl.load(values[None, :] + at, mask=(key < end)[:, None], other=0.0)
            top, total, out = _take(top, total, out, q, k, v, key, end, shows, MASKED)
    else:
        for start in range(begin, end, KEYS):
            later = start + KEYS + lane
            at = later[:, None].to(tl.int64) * key_stride
            next_k = tl.load(keys[None, :] + at, mask=(later < end)[:, None], other=0.0)
            next_v = tl.load(values[None, :] + at, mask=(later < end)[:, None], other=0.0)
            top, total, out = _take(top, total, out, q, k, v, start + lane, end, shows, MASKED)
            k, v = next_k, next_v
    highest = tl.max(top)
    weight = tl.exp(top - highest)
    whole = tl.sum(total * weight)
    some = whole > 0
    out = tl.sum(out * weight[:, None], 0) / tl.where(some, whole, 1.0)
    log = tl.where(some, highest + tl.log(tl.where(some, whole, 1.0)), _NOTHING)
    at = tl.program_id(0) * stretches + stretch
    tl.store(parts + at * WIDTH + channel, out.to(parts.dtype.element_ty))
    tl.store(scale + at, log)
