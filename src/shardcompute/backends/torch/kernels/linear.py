# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""y = x @ w.T for few rows, where all the time goes into reading w.

A program takes `BLOCK_N` outputs of `ROWS` rows over one of `SPLIT` ranges of the input. Where the input is split, the
program that finishes last adds the parts up in their order, so a result depends neither on timing nor on the row count:
the tile of the rows is padded, and every row is computed alike. `blocks` has the same for quantised weights.
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
def prefetch(ptrs):
    """Ask for the lines that these lie in, without waiting."""
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
def store_sums(
    sums,
    ups,
    bias_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    slot,
    part,
    row,
    column,
    rows,
    width_out,
    limit,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write `[BLOCK_N, ROWS]` sums of outputs `column [BLOCK_N, 1]` and rows `row [1, ROWS]`.

    `slot` numbers the tile among all tiles of the launch. With `GATED`, `ups` are the other half of a gated pair.
    """
    BLOCK_N: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    place = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    is_last = True
    if SPLIT > 1:
        tile_size: tl.constexpr = ROWS * BLOCK_N * (2 if GATED else 1)
        mine = part_ptr + (slot * SPLIT).to(tl.int64) * tile_size
        tl.store(mine + part * tile_size + place, sums)
        if GATED:
            tl.store(mine + part * tile_size + ROWS * BLOCK_N + place, ups)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + slot, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        if SPLIT > 1:
            tl.store(counter_ptr + slot, 0)
            sums = _sum_parts(mine, place, tile_size, SPLIT)
            if GATED:
                ups = _sum_parts(mine + ROWS * BLOCK_N, place, tile_size, SPLIT)
        if HAS_BIAS:
            inside = column < width_out
            sums += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                ups += tl.load(bias_ptr + width_out + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            sums = activate(sums, ups, limit, ACTIVATION)
        out = out_ptr + row.to(tl.int64) * width_out + column
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < width_out))


@triton.jit
def _multiply(sums, x, w_ptr, owner, at, width_in, IS_EVEN: tl.constexpr):
    """Add to `sums` the product of x with weights `[owner, at : at + BLOCK_K]`, the weights as the tall side."""
    k = tl.arange(0, x.shape[1])
    place = (owner * width_in)[:, None] + (at + k)[None, :]
    if IS_EVEN:
        w = tl.load(w_ptr + place, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptr + place, mask=(at + k < width_in)[None, :], other=0.0)
    return tl.dot(w, tl.trans(x), sums)


@triton.jit(do_not_specialize=["rows", "row_blocks", "limit"])
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
    row_blocks,
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
    slot = tl.program_id(0)
    part = tl.program_id(1)
    # Programs that read the same weights follow each other.
    m = (slot % row_blocks) * ROWS + tl.arange(0, ROWS)
    n = (slot // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    per_part = tl.cdiv(tl.cdiv(width_in, BLOCK_K), SPLIT) * BLOCK_K
    begin = part * per_part
    end = tl.minimum(begin + per_part, width_in)
    owner = n.to(tl.int64) if IS_EVEN else tl.minimum(n, width_out - 1).to(tl.int64)
    if PREFETCH > 0:
        line = tl.minimum(begin + tl.arange(0, PREFETCH) * 64, width_in - 64)
        prefetch(w_ptr + (owner * width_in)[:, None] + line[None, :])
        if GATED:
            prefetch(w_ptr + ((owner + width_out) * width_in)[:, None] + line[None, :])
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for at in range(begin, end, BLOCK_K):
        is_used = (m < rows)[:, None]
        if not IS_EVEN:
            is_used = is_used & (at + k < width_in)[None, :]
        x = tl.load(x_ptr + m[:, None] * x_stride + (at + k)[None, :], mask=is_used, other=0.0)
        sums = _multiply(sums, x, w_ptr, owner, at, width_in, IS_EVEN)
        if GATED:
            ups = _multiply(ups, x, w_ptr, owner + width_out, at, width_in, IS_EVEN)
    store_sums(
        sums, ups, bias_ptr, out_ptr, part_ptr, counter_ptr, slot, part, m[None, :], n[:, None],
        rows, width_out, limit, SPLIT, GATED, ACTIVATION, HAS_BIAS,
    )  # fmt: skip
