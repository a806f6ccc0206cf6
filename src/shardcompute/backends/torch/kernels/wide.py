# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""y = x @ w.T for many rows, where the time goes into arithmetic: `linear`'s sums, bit by bit, in larger tiles.

A program walks the whole input in the parts that `linear` gives to several programs, and adds the parts up in their
order. So a row of a long prompt has the bits that it would have alone.
"""

import triton
import triton.language as tl

from shardcompute.backends.torch.kernels.linear import activate


@triton.jit
def _load(
    source,
    first,
    at,
    count,
    width,
    stride,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows `first` on of a matrix, inputs `at` on; with `TMA` its source is a tensor descriptor. Rows past the last,
    which `count` ends, are anything."""
    if TMA:
        tile = source.load([first, at])
    else:
        i = tl.minimum(first + tl.arange(0, BLOCK), count - 1).to(tl.int64)
        k = at + tl.arange(0, BLOCK_K)
        if IS_EVEN:
            tile = tl.load(source + i[:, None] * stride + k[None, :])
        else:
            tile = tl.load(source + i[:, None] * stride + k[None, :], mask=(k < width)[None, :], other=0.0)
    return tile


@triton.jit
def _sum_part(
    x,
    w,
    first_row,
    first,
    begin,
    end,
    rows,
    width_in,
    width_out,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = sums
    for at in range(begin, end, BLOCK_K):
        x_tile = _load(x, first_row, at, rows, width_in, x_stride, ROWS, BLOCK_K, IS_EVEN, TMA)
        tile = _load(w, first, at, width_out, width_in, width_in, BLOCK_N, BLOCK_K, IS_EVEN, TMA)
        sums = tl.dot(tile, tl.trans(x_tile), sums)
        if GATED:
            up = width_out + first
            tile = _load(w, up, at, 2 * width_out, width_in, width_in, BLOCK_N, BLOCK_K, IS_EVEN, TMA)
            ups = tl.dot(tile, tl.trans(x_tile), ups)
    return sums, ups


@triton.jit(do_not_specialize=["rows", "row_blocks", "limit"])
def wide_linear(
    x,
    w,
    bias_ptr,
    out_ptr,
    rows,
    width_in,
    width_out,
    part_inputs,
    x_stride,
    limit,
    row_blocks,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """`GATED` as in `skinny_linear`."""
    slot = tl.program_id(0)
    first_row = (slot % row_blocks) * ROWS
    first = (slot // row_blocks) * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total, total_ups = _sum_part(
        x, w, first_row, first, 0, tl.minimum(part_inputs, width_in), rows, width_in, width_out, x_stride,
        ROWS, BLOCK_N, BLOCK_K, GATED, IS_EVEN, TMA,
    )  # fmt: skip
    if PARTS > 1:
        for part in range(1, PARTS):
            sums, ups = _sum_part(
                x, w, first_row, first, part * part_inputs, tl.minimum((part + 1) * part_inputs, width_in),
                rows, width_in, width_out, x_stride, ROWS, BLOCK_N, BLOCK_K, GATED, IS_EVEN, TMA,
            )  # fmt: skip
            total += sums
            if GATED:
                total_ups += ups
    row = (first_row + tl.arange(0, ROWS))[None, :]
    column = (first + tl.arange(0, BLOCK_N))[:, None]
    if HAS_BIAS:
        inside = column < width_out
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            total_ups += tl.load(bias_ptr + width_out + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = activate(total, total_ups, limit, ACTIVATION)
    out = out_ptr + row.to(tl.int64) * width_out + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < width_out))
