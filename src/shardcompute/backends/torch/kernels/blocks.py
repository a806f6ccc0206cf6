# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""y = x @ w.T for few rows and weights in quantised blocks, and such weights widened.

A codeword of 16 bits holds the codes of one place in `16 / BITS` neighbouring blocks (a *group*); a tile of
`TILE_OUTPUTS` outputs of one group lies in one piece (see `weights.BlockLinear`). So a row of codewords gives, by one
mask for every two weights, a row of each of the blocks, and a block's product is scaled as a whole, in float32: no
weight is rounded. Sums are made as `linear` makes them, in an order that no other row has a part in.
"""

import triton
import triton.language as tl

from shardcompute.backends.torch.kernels.linear import prefetch, store_sums
from shardcompute.backends.torch.weights import TILE_OUTPUTS as TILE

TILE_OUTPUTS = tl.constexpr(TILE)


def unpacking(bits: int, *, is_bfloat16: bool, is_centred: bool) -> tuple[str, str, str, str]:
    """Assembly that takes the codes at each place of two codewords as two numbers.

    A code or'd into the digits of 128 (bfloat16) or 1024 (float16) is that number plus the code; what is too much is
    subtracted, unless codes need not be centred. The top bit of 8 falls into bfloat16's exponent, where it adds 128 to
    128; what is subtracted differs by as much.
    """
    if is_bfloat16:
        one, middle = ("0x3F803F80", "0xC308C308" if bits == 4 else "0xC380C380")
        base, mask, kind = "0x43004300", "0x000F000F" if bits == 4 else "0x007F007F", "bf16x2"
    else:
        one, middle = ("0x3C003C00", "0xE408E408" if bits == 4 else "0xE480E480")
        base, mask, kind = "0x64006400", "0x000F000F" if bits == 4 else "0x00FF00FF", "f16x2"
    flip = "lop3.b32 middle, t, 0x00800080, middle, 0x6A; " if is_bfloat16 and bits == 8 else ""
    places = []
    for at in range(16 // bits):
        take = f"shr.b32 t, $1, {at * bits};" if at else "mov.b32 t, $1;"
        body = f"lop3.b32 $0, t, {mask}, {base}, 0xEA;"
        if is_centred:
            body = f"{flip}lop3.b32 t, t, {mask}, {base}, 0xEA; fma.rn.{kind} $0, t, one, middle;"
            take = f".reg .b32 one, middle; mov.b32 one, {one}; mov.b32 middle, {middle}; {take}"
        places.append("{ .reg .b32 t; " + take + " " + body + " }")
    first, second, third, fourth = (places * 2)[:4]
    return first, second, third, fourth


def surplus(bits: int, *, is_bfloat16: bool) -> float:
    """What codes that are not centred are too large by. Those of 8 bits are always centred."""
    return (128.0 if is_bfloat16 else 1024.0) + (1 << (bits - 1))


@triton.jit
def _plain_codes(words, AT: tl.constexpr, BITS: tl.constexpr):
    return ((words.to(tl.int32) >> (AT * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))


@triton.jit
def _codes(
    words,
    x,
    AT: tl.constexpr,
    BITS: tl.constexpr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
):
    """Codes number `AT` of codewords, less their middle, as x's kind of number; by `unpacking` where it is given."""
    if ASM_0 == "":
        codes = _plain_codes(words, AT, BITS).to(x.dtype)
    elif AT == 0:
        codes = tl.inline_asm_elementwise(ASM_0, "=r,r", [words], dtype=x.dtype, is_pure=True, pack=2)
    elif AT == 1:
        codes = tl.inline_asm_elementwise(ASM_1, "=r,r", [words], dtype=x.dtype, is_pure=True, pack=2)
    elif AT == 2:
        codes = tl.inline_asm_elementwise(ASM_2, "=r,r", [words], dtype=x.dtype, is_pure=True, pack=2)
    else:
        codes = tl.inline_asm_elementwise(ASM_3, "=r,r", [words], dtype=x.dtype, is_pure=True, pack=2)
    return codes


@triton.jit
def _half(words, AT: tl.constexpr):
    """The float16 number `AT` in each word, widened."""
    return ((words >> (16 * AT)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _multiply_group(
    sums,
    x_ptrs,
    used,
    words,
    scales,
    shifts,
    at,
    width_in,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    SURPLUS: tl.constexpr,
):
    """Add to `sums` the product of the rows at `x_ptrs [ROWS, BLOCK_SIZE]` with one group of blocks."""
    i = tl.arange(0, BLOCK_SIZE)
    for j in tl.static_range(0, 16 // BITS):
        inside = used
        if not IS_EVEN:
            inside = used & (at + j * BLOCK_SIZE + i < width_in)[None, :]
        x = tl.load(x_ptrs + j * BLOCK_SIZE, mask=inside, other=0.0)
        codes = _codes(words, x, j, BITS, ASM_0, ASM_1, ASM_2, ASM_3)
        scale = _half(scales, j)
        sums += tl.dot(codes, tl.trans(x)) * scale[:, None]
        if HAS_SHIFT:
            ones = tl.full((codes.shape[0], BLOCK_SIZE), 1.0, x.dtype)
            shift = _half(shifts, j) - SURPLUS * scale
            sums += tl.dot(ones, tl.trans(x)) * shift[:, None]
    return sums


@triton.jit
def skinny_blocks(
    x_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    rows,
    width_in,
    width_out,
    padded_out,
    groups,
    x_stride,
    limit,
    unit,
    row_blocks,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    SURPLUS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """`GATED`: w is gate over up, each `width_out` rows, and the two products are joined.

    `scale_ptr` and `shift_ptr` are `[groups, padded_out]` words of `16 / BITS` halves, in units of `unit`.
    """
    GROUP: tl.constexpr = BLOCK_SIZE * (16 // BITS)
    slot = tl.program_id(0)
    part = tl.program_id(1)
    m = (slot % row_blocks) * ROWS + tl.arange(0, ROWS)
    n = (slot // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_SIZE)
    per_part = tl.cdiv(groups, SPLIT)
    begin = part * per_part
    end = tl.minimum(begin + per_part, groups)
    tile = (n // TILE_OUTPUTS).to(tl.int64) * groups * TILE_OUTPUTS + n % TILE_OUTPUTS
    w_ptrs = w_ptr + tile[:, None] * BLOCK_SIZE + i[None, :]
    up_offset = width_out.to(tl.int64) * groups * BLOCK_SIZE
    if PREFETCH > 0:
        step = tl.arange(0, PREFETCH)[None, :] * TILE_OUTPUTS * BLOCK_SIZE
        first = w_ptr + (tile + begin * TILE_OUTPUTS)[:, None] * BLOCK_SIZE + step
        prefetch(first)
        if GATED:
            prefetch(first + up_offset)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    used = (m < rows)[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        x_ptrs = x_ptr + m[:, None] * x_stride + (group * GROUP + i)[None, :]
        place = group * TILE_OUTPUTS * BLOCK_SIZE
        scale_place = group * padded_out + n
        words = tl.load(w_ptrs + place, eviction_policy="evict_first")
        scales = tl.load(scale_ptr + scale_place)
        shifts = scales
        if HAS_SHIFT:
            shifts = tl.load(shift_ptr + scale_place)
        sums = _multiply_group(
            sums, x_ptrs, used, words, scales, shifts, group * GROUP, width_in,
            BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, ASM_0, ASM_1, ASM_2, ASM_3, SURPLUS,
        )  # fmt: skip
        if GATED:
            words = tl.load(w_ptrs + up_offset + place, eviction_policy="evict_first")
            scales = tl.load(scale_ptr + width_out + scale_place)
            if HAS_SHIFT:
                shifts = tl.load(shift_ptr + width_out + scale_place)
            ups = _multiply_group(
                ups, x_ptrs, used, words, scales, shifts, group * GROUP, width_in,
                BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, ASM_0, ASM_1, ASM_2, ASM_3, SURPLUS,
            )  # fmt: skip
    store_sums(
        sums, ups, unit, bias_ptr, out_ptr, part_ptr, counter_ptr, slot, part, m[None, :], n[:, None],
        rows, width_out, limit, SPLIT, GATED, ACTIVATION, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def widen_blocks(
    w_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    width_in,
    width_out,
    padded_out,
    groups,
    unit,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    """The dense weights `[width_out, width_in]` of one tile of outputs and one group, rounded once."""
    n = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK_SIZE)
    tile = tl.program_id(0).to(tl.int64) * groups + group
    codes_at = (tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS))[:, None] * BLOCK_SIZE + i[None, :]
    words = tl.load(w_ptr + codes_at)
    scales = tl.load(scale_ptr + group * padded_out + n)
    shifts = scales
    if HAS_SHIFT:
        shifts = tl.load(shift_ptr + group * padded_out + n)
    for j in tl.static_range(0, 16 // BITS):
        k = (group * (16 // BITS) + j) * BLOCK_SIZE + i
        w = _plain_codes(words, j, BITS).to(tl.float32) * _half(scales, j)[:, None]
        if HAS_SHIFT:
            w += _half(shifts, j)[:, None]
        inside = (n < width_out)[:, None] & (k < width_in)[None, :]
        place = n.to(tl.int64)[:, None] * width_in + k[None, :]
        tl.store(out_ptr + place, (w * unit).to(out_ptr.dtype.element_ty), mask=inside)
