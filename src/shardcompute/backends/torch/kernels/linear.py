# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""y = x @ w.T for few rows, where all the time goes into reading w.

A program takes `BLOCK_N` outputs over one of `SPLIT` ranges of the input. Where the input is split, the program
that finishes last adds the parts up in their order, so a result depends neither on timing nor on the row count:
the tile of the rows is padded, and every row is computed alike.
"""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, limit, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        joined = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        joined = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        # 0.5 · (1 + tanh(a)) is sigmoid(2a)
        joined = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        joined = gate * tl.sigmoid(1.702 * gate) * (up + 1)
    return joined


@triton.jit
def _prefetch(ptrs):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_parts(part_ptr, place, stride, SPLIT: tl.constexpr):
    total = tl.load(part_ptr + place, cache_modifier=".cg")
    for i in tl.static_range(1, SPLIT):
        total += tl.load(part_ptr + i * stride + place, cache_modifier=".cg")
    return total


@triton.jit
def skinny_linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    rows,
    width_in,
    width_out,
    x_stride,
    limit,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """`GATED`: w is gate over up, each `width_out` rows, and the two products are joined."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, ROWS)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    per_part = tl.cdiv(tl.cdiv(width_in, BLOCK_K), SPLIT) * BLOCK_K
    begin = part * per_part
    end = tl.minimum(begin + per_part, width_in)
    w_rows = n if IS_EVEN else tl.minimum(n, width_out - 1)
    w_ptrs = w_ptr + w_rows.to(tl.int64)[:, None] * width_in + k[None, :]
    up_offset = width_out.to(tl.int64) * width_in
    x_ptrs = x_ptr + m[:, None] * x_stride + k[None, :]
    if PREFETCH > 0:
        line = tl.arange(0, PREFETCH) * 64
        ahead = w_ptr + w_rows.to(tl.int64)[:, None] * width_in + begin + line[None, :]
        _prefetch(ahead)
        if GATED:
            _prefetch(ahead + up_offset)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # The weights are the tall side of the product, as Hopper's wide matrix instructions want it.
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for at in range(begin, end, BLOCK_K):
        if IS_EVEN:
            w = tl.load(w_ptrs + at, eviction_policy="evict_first")
            x = tl.load(x_ptrs + at, mask=(m < rows)[:, None], other=0.0)
            sums = tl.dot(w, tl.trans(x), sums)
            if GATED:
                up = tl.load(w_ptrs + up_offset + at, eviction_policy="evict_first")
                ups = tl.dot(up, tl.trans(x), ups)
        else:
            inside = (at + k < width_in)[None, :]
            w = tl.load(w_ptrs + at, mask=inside, other=0.0)
            x = tl.load(x_ptrs + at, mask=(m < rows)[:, None] & inside, other=0.0)
            sums = tl.dot(w, tl.trans(x), sums)
            if GATED:
                up = tl.load(w_ptrs + up_offset + at, mask=inside, other=0.0)
                ups = tl.dot(up, tl.trans(x), ups)

    row, column = m[None, :], n[:, None]
    place = tl.arange(0, BLOCK_N)[:, None] * ROWS + row
    is_last = True
    if SPLIT > 1:
        tile_size: tl.constexpr = ROWS * BLOCK_N * (2 if GATED else 1)
        mine = part_ptr + (tile * SPLIT).to(tl.int64) * tile_size
        tl.store(mine + part * tile_size + place, sums)
        if GATED:
            tl.store(mine + part * tile_size + ROWS * BLOCK_N + place, ups)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        if SPLIT > 1:
            tl.store(counter_ptr + tile, 0)
            sums = _sum_parts(mine, place, tile_size, SPLIT)
            if GATED:
                ups = _sum_parts(mine + ROWS * BLOCK_N, place, tile_size, SPLIT)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + column, mask=column < width_out, other=0.0).to(tl.float32)
            if GATED:
                ups += tl.load(bias_ptr + width_out + column, mask=column < width_out, other=0.0).to(
                    tl.float32
                )
        if GATED:
            sums = activate(sums, ups, limit, ACTIVATION)
        out = out_ptr + row * width_out + column
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < width_out))
