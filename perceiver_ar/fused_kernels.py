"""The Triton kernels of fused.py.

Most operations between two matrix products are fused into them; only keys already written are read.
While the previous kernel still runs, the next one fetches what it can, and computes what that allows
(programmatic dependent launch). This is safe for everything written before the step: the weights, and all
keys and values but the newest.

Letters: B batch, C channels, E input width, K head width, O outputs, I inputs of a linear map.
"""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # ty: ignore[import-not-found]

_NOTHING = tl.constexpr(-1e30)
"""The score of a masked key; lower than any real one."""


@triton.jit
def _read(
    x, scale, i, INPUTS: tl.constexpr, HEAD: tl.constexpr, MERGED: tl.constexpr, STRETCHES: tl.constexpr
):
    """A single row's inputs (1, IN): as stored or, if MERGED, attention's splits merged by log-sum-exp."""
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
    """Loads what does not depend on the previous kernel, and so can be read while that runs.

    For a single row this includes the weights (OUT, IN), and those of the preceding layer norm.
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
    """(ROWS, OUT) of a linear map, after a layer norm if NORM; over part of its inputs if SPLIT."""
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
            # 8-bit integers are exact in 16-bit floats.
            total = tl.dot(further.to(KIND), tl.trans(more.to(KIND)), total, input_precision="ieee")
    if SCALED:
        total = total * factor[None, :]
    return total if SPLIT else total + shift[None, :]


@triton.jit
def linear_kernel(
    x, scale, gain, base, weight, of_weight, bias, residual, out, eps,
    B: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, MERGED: tl.constexpr, SQUARED: tl.constexpr, ADDED: tl.constexpr,
    SPLIT: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """A few outputs of a linear map, fused with what comes before (merge, layer norm) and after it."""
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
def settle_kernel(
    z, parts, bias, gain, base, out, normal, eps, rows, width,
    SPLITS: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One row: adds a product's partial sums and bias to the latent, then applies a layer norm."""
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
def project_kernel(
    latents, source, latents_gain, latents_base, source_gain, source_base,
    query_weight, of_query, query_bias, key_weight, of_key, key_bias, value_weight, of_value, value_bias,
    own, other, turn_stride, query, keys, values, place, row_stride, head_stride, key_stride,
    eps, B: tl.constexpr, C: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, TURNED: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """A few channels of the query, the key (both rotated) or the value."""
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
        y = _projected(
            latents, latents_gain, latents_base, query_weight, of_query, query_bias, eps, row, o,
            B, C, WIDTH, SCALED, NORM, EARLY, kind, ROWS, OUT, IN,
        )  # fmt: skip
        tl.store(query + row * WIDTH + channel, _turn(y, factors, TURNED, ROWS, OUT).to(kind), mask=written)
    elif which == 1:
        y = _projected(
            source, source_gain, source_base, key_weight, of_key, key_bias, eps, row, o,
            B, E, WIDTH, SCALED, NORM, EARLY, kind, ROWS, OUT, IN,
        )  # fmt: skip
        tl.store(keys + to, _turn(y, factors, TURNED, ROWS, OUT).to(kind), mask=written)
    else:
        y = _projected(
            source, source_gain, source_base, value_weight, of_value, value_bias, eps, row, o,
            B, E, WIDTH, SCALED, NORM, EARLY, kind, ROWS, OUT, IN,
        )  # fmt: skip
        tl.store(values + to, y.to(kind), mask=written)


@triton.jit
def _projected(
    x, gain, base, weight, of_weight, bias, eps, row, o,
    B: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """(ROWS, OUT) of one linear map: fetches before the previous kernel ends, and computes after it."""
    fetched = _fetch(gain, base, weight, of_weight, bias, o, INPUTS, WIDTH, SCALED, NORM, ROWS, IN)
    if EARLY:
        gdc_wait()
    return _product(
        x, x, weight, fetched, eps, row, o, 0, INPUTS,
        B, INPUTS, WIDTH, 1, SCALED, NORM, False, 1, False, KIND, ROWS, OUT, IN,
    )  # fmt: skip


@triton.jit
def _turn(y, factors, TURNED: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr):
    """Applies the rotary embedding: each channel times one factor, plus its partner times another."""
    if TURNED:
        a, b = tl.split(tl.reshape(y, (ROWS, OUT // 2, 2)))
        y = y * factors[0] + tl.reshape(tl.join(b, a), (ROWS, OUT)) * factors[1]
    return y


@triton.jit
def _take(top, total, out, q, k, v, key, end, shows, MASKED: tl.constexpr):
    """Online softmax: adds one more key and value to each lane."""
    shown = key < end
    if MASKED:
        shown = shown & (tl.load(shows + key, mask=shown, other=0) != 0)
    score = tl.where(shown, tl.sum(k.to(tl.float32) * q[None, :], 1), _NOTHING)
    higher = tl.maximum(top, score)
    weight, before = tl.where(shown, tl.exp(score - higher), 0.0), tl.exp(top - higher)
    return higher, total * before + weight, out * before[:, None] + weight[:, None] * v.to(tl.float32)


@triton.jit
def attend_kernel(
    query, keys, values, place, visible, parts, scale,
    row_stride, head_stride, key_stride, heads, stretches, factor, visible_stride,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of one row and head to a split of the keys; the previous kernel wrote the newest key."""
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
    shows = visible + row * visible_stride
    at = tl.program_id(0) * stretches + stretch
    if STAGES:
        if EARLY:
            gdc_wait()
        out, log = _by_products(
            query + tl.program_id(0) * WIDTH + channel, keys, values, newest, key_stride, begin, end, factor,
            shows, MASKED, WIDTH, KEYS, STAGES,
        )  # fmt: skip
    else:
        key = begin + lane
        there = (key < end)[:, None]
        k = tl.load(keys[None, :] + key[:, None].to(tl.int64) * key_stride, mask=there, other=0.0)
        v = tl.load(values[None, :] + key[:, None].to(tl.int64) * key_stride, mask=there, other=0.0)
        if EARLY:
            gdc_wait()
        q = tl.load(query + tl.program_id(0) * WIDTH + channel).to(tl.float32) * factor
        first = (lane == 0) & (stretch == 0)  # accumulates the newest key
        top = tl.where(first, tl.sum(q * tl.load(keys + newest * key_stride).to(tl.float32)), _NOTHING)
        total = tl.where(first, 1.0, 0.0)
        out = tl.where(first[:, None], tl.load(values + newest * key_stride).to(tl.float32)[None, :], 0.0)
        for start in range(begin, end, KEYS):
            later = start + KEYS + lane
            there = (later < end)[:, None]
            next_k = tl.load(keys[None, :] + later[:, None].to(tl.int64) * key_stride, mask=there, other=0.0)
            next_v = tl.load(
                values[None, :] + later[:, None].to(tl.int64) * key_stride, mask=there, other=0.0
            )
            top, total, out = _take(top, total, out, q, k, v, start + lane, end, shows, MASKED)
            k, v = next_k, next_v
        highest = tl.max(top)
        weight = tl.exp(top - highest)
        whole = tl.sum(total * weight)
        some = whole > 0
        out = tl.sum(out * weight[:, None], 0) / tl.where(some, whole, 1.0)
        log = tl.where(some, highest + tl.log(tl.where(some, whole, 1.0)), _NOTHING)
    tl.store(parts + at * WIDTH + channel, out.to(parts.dtype.element_ty))
    tl.store(scale + at, log)


@triton.jit
def _by_products(
    query, keys, values, newest, key_stride, begin, end, factor, shows,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All keys of one head, by matrix products.

    These need at least 16 rows, so the query is repeated 16 times.
    """
    kind: tl.constexpr = keys.dtype.element_ty
    lane = tl.arange(0, KEYS)
    q = tl.load(query)
    score = tl.sum(q.to(tl.float32) * tl.load(keys + newest * key_stride).to(tl.float32)) * factor
    top, total = tl.zeros((16,), tl.float32) + score, tl.zeros((16,), tl.float32) + 1.0
    newest_value = tl.load(values + newest * key_stride).to(tl.float32)
    out = tl.broadcast_to(newest_value[None, :], (16, WIDTH))
    q = tl.broadcast_to(q[None, :], (16, WIDTH))
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + lane
        shown = key < end
        at = key[:, None].to(tl.int64) * key_stride
        k = tl.load(keys[None, :] + at, mask=shown[:, None], other=0.0)
        v = tl.load(values[None, :] + at, mask=shown[:, None], other=0.0)
        if MASKED:
            shown = shown & (tl.load(shows + key, mask=shown, other=0) != 0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        scores = tl.where(shown[None, :], scores, _NOTHING)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight, before = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        out = out * before[:, None] + tl.dot(weight.to(kind), v, input_precision="ieee")
        top, total = higher, total * before + tl.sum(weight, 1)
    return tl.max(out / total[:, None], 0), tl.max(top + tl.log(total))
