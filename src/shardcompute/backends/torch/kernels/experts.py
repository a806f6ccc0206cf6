# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Sparse feed-forward blocks for few rows: each expert's weights are read once for all rows that chose it.

A *pair* is a row and one of its experts, numbered row by row. `choose_experts` chooses them; `group_pairs` puts pairs
of one expert side by side, in tiles of `ROWS`; `expert_linear` multiplies a tile with its expert's matrix; `join_pairs`
adds up each row's. All is decided on the device, and no row's sums depend on what other rows chose.
"""

import triton
import triton.language as tl

from shardcompute.backends.torch.kernels.blocks import TILE_OUTPUTS, multiply_group
from shardcompute.backends.torch.kernels.linear import activate


@triton.jit(do_not_specialize=["scale"])
def choose_experts(
    logit_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    order_ptr,
    tile_ptr,
    experts,
    scale,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    KEEPS_LOGITS: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one row and their weights, best first; ties go to the lower number (see `core.expert_routing`).
    `EXPERTS` and `SLOTS` are rounded up to powers of two. `IS_SINGLE`: there is no other row, and its pairs, each of an
    expert of its own, are grouped here too."""
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    inside = expert < experts
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits = tl.load(logit_ptr + row * experts + expert, mask=inside, other=float("-inf"))
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    judged = logits if BY_LOGITS else scores
    if HAS_BIAS:
        judged += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    judged = tl.where(inside, judged, float("-inf"))
    kept = logits if KEEPS_LOGITS else scores
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    values = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    for rank in tl.static_range(0, PER_TOKEN):
        # Of numbers that are none, too, an expert is chosen that exists.
        best = tl.minimum(tl.argmax(judged, 0), experts - 1)
        is_best = expert == best
        value = tl.max(tl.where(is_best, kept, float("-inf")), 0)
        chosen = tl.where(slot == rank, best, chosen)
        values = tl.where(slot == rank, value, values)
        judged = tl.where(is_best, float("-inf"), judged)
    used = slot < PER_TOKEN
    weights = values
    if OVER_CHOSEN:
        if IS_SIGMOID:
            weights = values / (tl.sum(tl.where(used, values, 0.0), 0) + LEAST_SUM)
        else:
            powers = tl.exp(values - tl.max(values, 0))
            weights = powers / tl.sum(powers, 0)
    tl.store(expert_ptr + row * PER_TOKEN + slot, chosen, mask=used)
    tl.store(weight_ptr + row * PER_TOKEN + slot, weights * scale, mask=used)
    if IS_SINGLE:
        tl.store(order_ptr + slot, slot, mask=used)
        tl.store(tile_ptr + 3 * slot, chosen, mask=used)
        tl.store(tile_ptr + 3 * slot + 1, slot, mask=used)
        tl.store(tile_ptr + 3 * slot + 2, tl.full((SLOTS,), 1, tl.int32), mask=used)


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
def _dense_products(
    x_ptr,
    w_ptr,
    x_place,
    used,
    n,
    width_in,
    width_out,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products of rows with the outputs `n` and, `GATED`, with those `width_out` behind them."""
    BLOCK_N: tl.constexpr = n.shape[0]
    k = tl.arange(0, BLOCK_K)
    owner = tl.minimum(n, width_out - 1).to(tl.int64) * width_in
    up_ptr = w_ptr + width_out.to(tl.int64) * width_in
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for at in tl.range(0, width_in, BLOCK_K, num_stages=STAGES):
        inside = (at + k < width_in)[None, :]
        x = tl.load(x_ptr + x_place + (at + k)[None, :], mask=used & inside, other=0.0)
        place = owner[:, None] + (at + k)[None, :]
        w = tl.load(w_ptr + place, mask=inside, other=0.0)
        sums = tl.dot(w, tl.trans(x), sums)
        if GATED:
            w = tl.load(up_ptr + place, mask=inside, other=0.0)
            ups = tl.dot(w, tl.trans(x), ups)
    return sums, ups


@triton.jit
def _block_products(
    x_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    x_place,
    used,
    n,
    width_in,
    width_out,
    padded_out,
    groups,
    begin,
    end,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same for weights in blocks, over some of their groups."""
    BLOCK_N: tl.constexpr = n.shape[0]
    GROUP: tl.constexpr = BLOCK_SIZE * (16 // BITS)
    i = tl.arange(0, BLOCK_SIZE)
    tile = (n // TILE_OUTPUTS).to(tl.int64) * groups * TILE_OUTPUTS + n % TILE_OUTPUTS
    w_ptrs = w_ptr + tile[:, None] * BLOCK_SIZE + i[None, :]
    up_offset = width_out.to(tl.int64) * groups * BLOCK_SIZE
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        place = group * TILE_OUTPUTS * BLOCK_SIZE
        scale_place = group * padded_out + n
        words = tl.load(w_ptrs + place)
        scales = tl.load(scale_ptr + scale_place)
        shifts = scales
        if HAS_SHIFT:
            shifts = tl.load(shift_ptr + scale_place)
        sums = multiply_group(
            sums, x_ptr, x_place, used, words, scales, shifts, group * GROUP, width_in,
            ASM_0, ASM_1, ASM_2, ASM_3, BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, False,
        )  # fmt: skip
        if GATED:
            words = tl.load(w_ptrs + up_offset + place)
            scales = tl.load(scale_ptr + width_out + scale_place)
            if HAS_SHIFT:
                shifts = tl.load(shift_ptr + width_out + scale_place)
            ups = multiply_group(
                ups, x_ptr, x_place, used, words, scales, shifts, group * GROUP, width_in,
                ASM_0, ASM_1, ASM_2, ASM_3, BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, False,
            )  # fmt: skip
    return sums, ups


@triton.jit
def _join_row(y_ptr, weight_ptr, out_ptr, at, width, part_stride, PER_ROW: tl.constexpr, SPLIT: tl.constexpr):
    """The weighted sum of a row's pairs at some outputs, best expert first; of each, its parts are added up before."""
    total = tl.zeros(at.shape, dtype=tl.float32)
    for rank in tl.static_range(0, PER_ROW):
        y = tl.load(y_ptr + rank * width + at, mask=at < width, other=0.0, cache_modifier=".cg")
        for part in tl.static_range(1, SPLIT):
            place = part * part_stride + rank * width + at
            y += tl.load(y_ptr + place, mask=at < width, other=0.0, cache_modifier=".cg")
        total = tl.fma(y, tl.load(weight_ptr + rank), total)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["limit", "pairs"])
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
    weight_ptr,
    joined_ptr,
    counter_ptr,
    pairs,
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
    IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pointers are those of the first expert, and `offset [experts, 4]` how far each one's weights, scales, shifts and
    biases are from them. A row of x belongs to `PER_ROW` pairs. `GATED` as in `skinny_linear`. `JOINED` is how many
    pairs there are of a single row, which the last program of each tile of outputs adds up as `join_pairs` does, or 0.
    Weights in blocks, not gated, may be split along the input: `out [SPLIT, pairs, width_out]` are the parts of sums.
    """
    part = tl.program_id(2)
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
        sums, ups = _dense_products(
            x_ptr, w_ptr, x_place, used, n, width_in, width_out, ROWS, BLOCK_K, GATED, STAGES
        )
    else:
        scale_ptr += tl.multiple_of(tl.load(offset_ptr + 1), 16)
        shift_ptr += tl.multiple_of(tl.load(offset_ptr + 2), 16)
        per_part = tl.cdiv(groups, SPLIT)
        begin = part * per_part
        sums, ups = _block_products(
            x_ptr, w_ptr, scale_ptr, shift_ptr, x_place, used, n, width_in, width_out, padded_out, groups,
            begin, tl.minimum(begin + per_part, groups),
            ASM_0, ASM_1, ASM_2, ASM_3, ROWS, BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, GATED, STAGES,
        )  # fmt: skip
    inside = (n < width_out)[:, None]
    if HAS_BIAS:
        bias_ptr += tl.load(offset_ptr + 3)
        sums += tl.load(bias_ptr + n[:, None], mask=inside & (part == 0), other=0.0).to(tl.float32)
        if GATED:
            ups += tl.load(bias_ptr + width_out + n[:, None], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        sums = activate(sums, ups, limit, ACTIVATION)
    out = out_ptr + (part * pairs + pair).to(tl.int64)[None, :] * width_out + n[:, None]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=inside & (m < count)[None, :])
    if JOINED > 0:
        tl.debug_barrier()
        counter = counter_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == JOINED * SPLIT - 1:
            tl.store(counter, 0)
            _join_row(
                out_ptr, weight_ptr, joined_ptr, n, width_out, pairs.to(tl.int64) * width_out, JOINED, SPLIT
            )


@triton.jit
def join_pairs(
    y_ptr,
    weight_ptr,
    out_ptr,
    width,
    part_stride,
    PER_ROW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of each row's pairs, best expert first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pairs = row * PER_ROW
    _join_row(
        y_ptr + pairs * width,
        weight_ptr + pairs,
        out_ptr + row * width,
        at,
        width,
        part_stride,
        PER_ROW,
        SPLIT,
    )
