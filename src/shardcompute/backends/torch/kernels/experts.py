# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Sparse feed-forward blocks for few rows: each expert's weights are read once for all rows that chose it.

A *pair* is a row and one of its chosen experts, numbered row by row. `group_pairs` puts pairs of one expert side by
side, in tiles of `ROWS`; `expert_linear` multiplies a tile with its expert's matrix; `join_pairs` adds up each row's.
All is decided on the device, and no row's sums depend on what other rows chose.
"""

import triton
import triton.language as tl

from shardcompute.backends.torch.kernels.blocks import TILE_OUTPUTS, multiply_group
from shardcompute.backends.torch.kernels.linear import activate


@triton.jit(do_not_specialize=["pairs", "tiles"])
def group_pairs(
    expert_ptr,
    order_ptr,
    tile_ptr,
    pairs,
    tiles,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program. `order` are pairs by expert; `tile [tiles, 3]` an expert, its first place in `order`, and a count,
    which is 0 in tiles that are not needed. `EXPERTS` is rounded up to a power of two."""
    expert = tl.arange(0, EXPERTS)
    c = tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for at in range(0, pairs, CHUNK):
        chosen = tl.load(expert_ptr + at + c, mask=at + c < pairs, other=-1)
        counts += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    first = tl.cumsum(counts, 0) - counts
    needed = (counts + ROWS - 1) // ROWS
    first_tile = tl.cumsum(needed, 0) - needed
    reached = first
    for at in range(0, pairs, CHUNK):
        chosen = tl.load(expert_ptr + at + c, mask=at + c < pairs, other=-1)
        is_chosen = (chosen[:, None] == expert[None, :]).to(tl.int32)
        before = tl.cumsum(is_chosen, 0) - is_chosen
        place = tl.sum(is_chosen * (reached[None, :] + before), 1)
        tl.store(order_ptr + place, at + c, mask=at + c < pairs)
        reached += tl.sum(is_chosen, 0)
    for at in range(0, tiles, CHUNK):
        tl.store(tile_ptr + 3 * (at + c) + 2, tl.zeros((CHUNK,), tl.int32), mask=at + c < tiles)
    tl.debug_barrier()
    for index in range(tl.max(needed, 0)):
        target = tile_ptr + 3 * (first_tile + index)
        tl.store(target, expert, mask=index < needed)
        tl.store(target + 1, first + index * ROWS, mask=index < needed)
        tl.store(target + 2, tl.minimum(counts - index * ROWS, ROWS), mask=index < needed)


@triton.jit
def _dense_product(
    x_ptr, w_ptr, x_place, used, n, width_in, width_out, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    BLOCK_N: tl.constexpr = n.shape[0]
    k = tl.arange(0, BLOCK_K)
    owner = tl.minimum(n, width_out - 1).to(tl.int64) * width_in
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for at in range(0, width_in, BLOCK_K):
        inside = (at + k < width_in)[None, :]
        x = tl.load(x_ptr + x_place + (at + k)[None, :], mask=used & inside, other=0.0)
        w = tl.load(w_ptr + owner[:, None] + (at + k)[None, :], mask=inside, other=0.0)
        sums = tl.dot(w, tl.trans(x), sums)
    return sums


@triton.jit
def _block_product(
    x_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    x_place,
    used,
    n,
    width_in,
    padded_out,
    groups,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    BLOCK_N: tl.constexpr = n.shape[0]
    GROUP: tl.constexpr = BLOCK_SIZE * (16 // BITS)
    i = tl.arange(0, BLOCK_SIZE)
    tile = (n // TILE_OUTPUTS).to(tl.int64) * groups * TILE_OUTPUTS + n % TILE_OUTPUTS
    words_at = tile[:, None] * BLOCK_SIZE + i[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for group in range(groups):
        words = tl.load(w_ptr + words_at + group * TILE_OUTPUTS * BLOCK_SIZE)
        scales = tl.load(scale_ptr + group * padded_out + n)
        shifts = scales
        if HAS_SHIFT:
            shifts = tl.load(shift_ptr + group * padded_out + n)
        sums = multiply_group(
            sums, x_ptr, x_place, used, words, scales, shifts, group * GROUP, width_in,
            ASM_0, ASM_1, ASM_2, ASM_3, BITS, BLOCK_SIZE, HAS_SHIFT, False, False,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["limit"])
def expert_linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    bias_ptr,
    offset_ptr,
    out_ptr,
    order_ptr,
    tile_ptr,
    width_in,
    width_out,
    padded_out,
    groups,
    x_stride,
    limit,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pointers are those of the first expert, and `offset [experts, 4]` how far each one's weights, scales, shifts and
    biases are from them. A row of x belongs to `PER_ROW` pairs. `GATED` as in `skinny_linear`."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(tile_ptr + 3 * at + 2)
    if count == 0:
        return
    offset_ptr += tl.load(tile_ptr + 3 * at) * 4
    m = tl.arange(0, ROWS)
    pair = tl.load(order_ptr + tl.load(tile_ptr + 3 * at + 1) + m, mask=m < count, other=0)
    used = (m < count)[:, None]
    x_place = ((pair // PER_ROW).to(tl.int64) * x_stride)[:, None]
    w_ptr += tl.multiple_of(tl.load(offset_ptr), 16)
    if BITS == 16:
        sums = _dense_product(x_ptr, w_ptr, x_place, used, n, width_in, width_out, ROWS, BLOCK_K)
        ups = sums
        if GATED:
            up_ptr = w_ptr + width_out.to(tl.int64) * width_in
            ups = _dense_product(x_ptr, up_ptr, x_place, used, n, width_in, width_out, ROWS, BLOCK_K)
    else:
        scale_ptr += tl.multiple_of(tl.load(offset_ptr + 1), 16)
        shift_ptr += tl.multiple_of(tl.load(offset_ptr + 2), 16)
        sums = _block_product(
            x_ptr, w_ptr, scale_ptr, shift_ptr, x_place, used, n, width_in, padded_out, groups,
            ASM_0, ASM_1, ASM_2, ASM_3, ROWS, BITS, BLOCK_SIZE, HAS_SHIFT,
        )  # fmt: skip
        ups = sums
        if GATED:
            ups = _block_product(
                x_ptr, w_ptr, scale_ptr, shift_ptr, x_place, used, n + width_out, width_in, padded_out, groups,
                ASM_0, ASM_1, ASM_2, ASM_3, ROWS, BITS, BLOCK_SIZE, HAS_SHIFT,
            )  # fmt: skip
    inside = (n < width_out)[:, None]
    if HAS_BIAS:
        bias_ptr += tl.load(offset_ptr + 3)
        sums += tl.load(bias_ptr + n[:, None], mask=inside, other=0.0).to(tl.float32)
        if GATED:
            ups += tl.load(bias_ptr + width_out + n[:, None], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        sums = activate(sums, ups, limit, ACTIVATION)
    out = out_ptr + pair.to(tl.int64)[None, :] * width_out + n[:, None]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=inside & (m < count)[None, :])


@triton.jit
def join_pairs(
    y_ptr, weight_ptr, out_ptr, width, PER_ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The weighted sum of each row's pairs, best expert first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(0, PER_ROW):
        pair = row * PER_ROW + rank
        y = tl.load(y_ptr + pair * width + at, mask=at < width, other=0.0)
        total += y * tl.load(weight_ptr + pair)
    tl.store(out_ptr + row * width + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
