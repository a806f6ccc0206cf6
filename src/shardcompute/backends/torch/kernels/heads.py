# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""What lies between the matrices: residual sums with their norms, gates, and heads on their way to attention."""

import triton
import triton.language as tl

from shardcompute.backends.torch.kernels.linear import activate


@triton.jit
def gate_rows(x_ptr, out_ptr, width, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Join the halves of each row, `width` wide each."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    joined = activate(gate, up, limit, ACTIVATION)
    tl.store(out_ptr + row * width + at, joined.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def add_norm(
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    HAS_ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Root-mean-square norm of a row; with `HAS_ADD` of x + y, which is kept, rounded as it is kept."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADD:
        x += tl.load(y_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + at, kept, mask=inside)
        x = kept.to(tl.float32)
    mean = tl.sum(x * x) / width
    normed = x * tl.rsqrt(mean + eps) * weight
    tl.store(out_ptr + row * width + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turned(
    x_ptrs,
    norm_ptr,
    cosine_ptr,
    sine_ptr,
    turn,
    eps,
    mask,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads `[HEAD_BLOCK, D_BLOCK]` whose first entries lie at `x_ptrs [HEAD_BLOCK, 1]`, turned by the position `turn`,
    or by one for each entry."""
    d = tl.arange(0, D_BLOCK)
    x = tl.load(x_ptrs + d[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * factor * tl.load(norm_ptr + d, mask=d < HEAD_DIM, other=0.0)[None, :]
    if HALF > 0:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        is_turning = d < 2 * HALF
        y = tl.load(x_ptrs + other[None, :], mask=mask & is_turning[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            y = y * factor * tl.load(norm_ptr + other, mask=is_turning, other=0.0)[None, :]
        angle = turn * HALF + tl.where(d < HALF, d, d - HALF)
        cosine = tl.load(cosine_ptr + angle, mask=is_turning, other=1.0)[None, :]
        sine = tl.load(sine_ptr + angle, mask=is_turning, other=0.0)
        x = x * cosine + y * tl.where(d < HALF, -sine, sine)[None, :]
    return x


@triton.jit
def place_heads(
    q_ptr,
    k_ptr,
    v_ptr,
    q_stride,
    k_stride,
    v_stride,
    q_norm_ptr,
    k_norm_ptr,
    cosine_ptr,
    sine_ptr,
    q_out_ptr,
    pool_ptr,
    position_ptr,
    turn_ptr,
    axis_ptr,
    owner_ptr,
    table_ptr,
    turn_stride,
    table_stride,
    page_stride,
    value_offset,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_AXES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and turn some heads of a row: queries to `q_out`, keys and values to their place in the pages.

    A row turns by `turn_ptr [3, rows]`: by the first, or by that which `axis_ptr` names for each pair.
    The second axis of the grid holds blocks of query heads, then of key heads, then of value heads.
    """
    Q_BLOCKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = tl.arange(0, D_BLOCK)[None, :]
    inside = d < HEAD_DIM
    each = tl.arange(0, HEAD_BLOCK)[:, None]
    position = tl.load(position_ptr + row)
    turn = tl.load(turn_ptr + row)
    if HAS_AXES:
        entry = tl.arange(0, D_BLOCK)
        pair = tl.where(entry < HALF, entry, entry - HALF)
        axis = tl.load(axis_ptr + pair, mask=entry < 2 * HALF, other=0)
        turn = tl.load(turn_ptr + axis * turn_stride + row)
    owner = tl.load(owner_ptr + row)
    page = tl.load(table_ptr + owner * table_stride + position // PAGE).to(tl.int64)
    place = pool_ptr + page * page_stride + (position % PAGE) * HEAD_DIM
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if block < Q_BLOCKS:
        head = block * HEAD_BLOCK + each
        mask = (head < HEADS) & inside
        source = q_ptr + row * q_stride + head * HEAD_DIM
        x = _turned(
            source, q_norm_ptr, cosine_ptr, sine_ptr, turn, eps, mask, HEAD_DIM, D_BLOCK, HALF, HAS_NORM
        )
        target = q_out_ptr + (row * HEADS + head) * HEAD_DIM + d
        tl.store(target, x.to(q_out_ptr.dtype.element_ty), mask=mask)
    elif block < Q_BLOCKS + KV_BLOCKS:
        head = (block - Q_BLOCKS) * HEAD_BLOCK + each
        mask = (head < KV_HEADS) & inside
        source = k_ptr + row * k_stride + head * HEAD_DIM
        x = _turned(
            source, k_norm_ptr, cosine_ptr, sine_ptr, turn, eps, mask, HEAD_DIM, D_BLOCK, HALF, HAS_NORM
        )
        tl.store(place + head * PAGE * HEAD_DIM + d, x.to(pool_ptr.dtype.element_ty), mask=mask)
    else:
        head = (block - Q_BLOCKS - KV_BLOCKS) * HEAD_BLOCK + each
        mask = (head < KV_HEADS) & inside
        x = tl.load(v_ptr + row * v_stride + head * HEAD_DIM + d, mask=mask, other=0.0).to(tl.float32)
        target = place + value_offset + head * PAGE * HEAD_DIM + d
        tl.store(target, x.to(pool_ptr.dtype.element_ty), mask=mask)
