# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""y = x @ w.T for few rows and weights in quantised blocks, without widening them in memory.

Codes are small whole numbers, which the matrix units multiply exactly; the scale of a block is applied to its
sum, in float32, so the weights are never rounded a second time. A shift is worth itself times the sum of x over
the block.
"""

import triton
import triton.language as tl


@triton.jit
def block_linear(
    x_ptr,
    code_ptr,
    scale_ptr,
    shift_ptr,
    bias_ptr,
    out_ptr,
    rows,
    blocks,
    width_out,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`blocks`, the blocks of an output, is a multiple of `UNROLL`, the blocks of one turn of the loop."""
    CODE_BYTES: tl.constexpr = BLOCK_SIZE * BITS // 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    at = tl.arange(0, CODE_BYTES)
    owner = tl.minimum(n, width_out - 1).to(tl.int64)
    code_ptrs = code_ptr + (owner * blocks * CODE_BYTES)[:, None] + at[None, :]
    scale_ptrs = scale_ptr + owner * blocks
    shift_ptrs = shift_ptr + owner * blocks
    # Two codes of 4 bits share a byte: even inputs lie in its low half, odd ones in the high half.
    STEP: tl.constexpr = 8 // BITS
    x_ptrs = x_ptr + m[:, None] * x_stride + at[None, :] * STEP
    is_row = (m < rows)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for first in range(0, blocks, UNROLL):
        for i in tl.static_range(UNROLL):
            block = first + i
            codes = tl.load(code_ptrs + block * CODE_BYTES)
            scale = tl.load(scale_ptrs + block)
            x = tl.load(x_ptrs + block * BLOCK_SIZE, mask=is_row, other=0.0)
            if BITS == 4:
                odd = tl.load(x_ptrs + block * BLOCK_SIZE + 1, mask=is_row, other=0.0)
                low = ((codes & 15).to(tl.int8) - 8).to(x.dtype)
                high = ((codes >> 4).to(tl.int8) - 8).to(x.dtype)
                part = tl.dot(x, tl.trans(low))
                part = tl.dot(odd, tl.trans(high), part)
            else:
                part = tl.dot(x, tl.trans((codes.to(tl.int16) - 128).to(x.dtype)))
            total += part * scale[None, :]
            if HAS_SHIFT:
                sums = tl.sum(x.to(tl.float32), 1)
                if BITS == 4:
                    sums += tl.sum(odd.to(tl.float32), 1)
                total += sums[:, None] * tl.load(shift_ptrs + block)[None, :]
    column = n[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < width_out, other=0.0).to(tl.float32)
    out = out_ptr + m[:, None] * width_out + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row & (column < width_out))
