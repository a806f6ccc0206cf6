# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""y = x @ w.T for few rows and weights in quantised blocks, and such weights widened.

A codeword of 16 bits holds the codes of one place in `16 / BITS` neighbouring blocks (a *group*); a tile of
`TILE_OUTPUTS` outputs of one group lies in one piece (see `weights.BlockLinear`). So a row of codewords gives, by one
mask for every two weights, a row of each of the blocks, which two multiplications widen: a weight is rounded once, to
the numbers that are computed with. Sums are made as `linear` makes them, in an order that no other row has a part in.
"""

import triton
import triton.language as tl

from shardcompute.backends.torch.kernels.linear import store_sums
from shardcompute.backends.torch.weights import TILE_OUTPUTS as TILE

TILE_OUTPUTS = tl.constexpr(TILE)


def unpacking(bits: int, *, is_bfloat16: bool, has_shift: bool) -> tuple[str, str, str, str]:
    """Assembly that makes two weights of the codes at each place of two codewords, and of two scales and shifts.

    A code or'd into the digits of 128 (bfloat16) or 1024 (float16) is that number plus the code; what is too much is
    subtracted. The top bit of 8 falls into bfloat16's exponent, where it adds 128 to 128; what is subtracted differs by
    as much.
    """
    if is_bfloat16:
        one, middle, kind = "0x3F803F80", "0xC308C308" if bits == 4 else "0xC380C380", "bf16x2"
        base, mask = "0x43004300", "0x000F000F" if bits == 4 else "0x007F007F"
    else:
        one, middle, kind = "0x3C003C00", "0xE408E408" if bits == 4 else "0xE480E480", "f16x2"
        base, mask = "0x64006400", "0x000F000F" if bits == 4 else "0x00FF00FF"
    flip = "lop3.b32 middle, t, 0x00800080, middle, 0x6A; " if is_bfloat16 and bits == 8 else ""
    shift = "$3" if has_shift else "nothing"
    places = [
        "{ .reg .b32 t, one, middle, nothing; "
        f"mov.b32 one, {one}; mov.b32 middle, {middle}; mov.b32 nothing, 0x80008000; "
        f"shr.b32 t, $1, {at * bits}; {flip}lop3.b32 t, t, {mask}, {base}, 0xEA; "
        f"fma.rn.{kind} t, t, one, middle; fma.rn.{kind} $0, t, $2, {shift}; }}"
        for at in range(16 // bits)
    ]
    first, second, third, fourth = (places * 2)[:4]
    return first, second, third, fourth


@triton.jit
def _plain_codes(words, AT: tl.constexpr, BITS: tl.constexpr):
    return ((words.to(tl.int32) >> (AT * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))


@triton.jit
def _half(words, like_ptr, AT: tl.constexpr):
    """The number `AT` of 16 bits in each word, of the kind that the pointer points at."""
    return (words >> (16 * AT)).to(tl.int16).to(like_ptr.dtype.element_ty, bitcast=True)


@triton.jit
def _weights(
    words, scale, shift, ASM: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr, HAS_SHIFT: tl.constexpr
):
    """The weights of one block, by `unpacking` where it is given. `scale` and `shift` are `[outputs, 1]`."""
    if ASM == "":
        wide = _plain_codes(words, AT, BITS).to(tl.float32) * scale.to(tl.float32)
        if HAS_SHIFT:
            wide += shift.to(tl.float32)
        weights = wide.to(scale.dtype)
    else:
        weights = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, scale, shift], dtype=scale.dtype, is_pure=True, pack=2
        )
    return weights


@triton.jit
def _block_weights(
    words,
    scales,
    shifts,
    like_ptr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    AT: tl.constexpr,
    BITS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    """The weights of block `AT` of a group, as numbers of the kind that the pointer points at."""
    scale = _half(scales, like_ptr, AT)[:, None]
    shift = _half(shifts, like_ptr, AT)[:, None]
    if AT == 0:
        weights = _weights(words, scale, shift, ASM_0, AT, BITS, HAS_SHIFT)
    elif AT == 1:
        weights = _weights(words, scale, shift, ASM_1, AT, BITS, HAS_SHIFT)
    elif AT == 2:
        weights = _weights(words, scale, shift, ASM_2, AT, BITS, HAS_SHIFT)
    else:
        weights = _weights(words, scale, shift, ASM_3, AT, BITS, HAS_SHIFT)
    return weights


@triton.jit
def _group_weights(
    words,
    scales,
    shifts,
    like_ptr,
    BITS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
):
    """The weights of all blocks of a group, one block after the other; in registers no one moves."""
    N: tl.constexpr = words.shape[0]
    GROUP: tl.constexpr = words.shape[1] * (16 // BITS)
    if BITS == 8:
        first = _block_weights(
            words, scales, shifts, like_ptr, ASM_0, ASM_1, ASM_2, ASM_3, 0, BITS, HAS_SHIFT
        )
        second = _block_weights(
            words, scales, shifts, like_ptr, ASM_0, ASM_1, ASM_2, ASM_3, 1, BITS, HAS_SHIFT
        )
        weights = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (N, GROUP))
    else:
        first = _block_weights(
            words, scales, shifts, like_ptr, ASM_0, ASM_1, ASM_2, ASM_3, 0, BITS, HAS_SHIFT
        )
        second = _block_weights(
            words, scales, shifts, like_ptr, ASM_0, ASM_1, ASM_2, ASM_3, 1, BITS, HAS_SHIFT
        )
        third = _block_weights(
            words, scales, shifts, like_ptr, ASM_0, ASM_1, ASM_2, ASM_3, 2, BITS, HAS_SHIFT
        )
        fourth = _block_weights(
            words, scales, shifts, like_ptr, ASM_0, ASM_1, ASM_2, ASM_3, 3, BITS, HAS_SHIFT
        )
        joined = tl.join(tl.join(first, second), tl.join(third, fourth))
        weights = tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (N, GROUP))
    return weights


@triton.jit
def multiply_group(
    sums,
    x_ptr,
    x_place,
    used,
    words,
    scales,
    shifts,
    at,
    width_in,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Add to `sums` the product of rows of x, which begin at `x_place`, with one group of blocks: block by block, or
    `JOINED`, so that a block is widened while others are multiplied."""
    if JOINED:
        k = tl.arange(0, BLOCK_SIZE * (16 // BITS))
        inside = used
        if not IS_EVEN:
            inside = used & (at + k < width_in)[None, :]
        x = tl.load(x_ptr + x_place + (at + k)[None, :], mask=inside, other=0.0)
        w = _group_weights(words, scales, shifts, x_ptr, BITS, HAS_SHIFT, ASM_0, ASM_1, ASM_2, ASM_3)
        sums = tl.dot(w, tl.trans(x), sums)
    else:
        i = tl.arange(0, BLOCK_SIZE)
        for j in tl.static_range(0, 16 // BITS):
            inside = used
            if not IS_EVEN:
                inside = used & (at + j * BLOCK_SIZE + i < width_in)[None, :]
            x = tl.load(x_ptr + x_place + (at + j * BLOCK_SIZE + i)[None, :], mask=inside, other=0.0)
            w = _block_weights(words, scales, shifts, x_ptr, ASM_0, ASM_1, ASM_2, ASM_3, j, BITS, HAS_SHIFT)
            sums = tl.dot(w, tl.trans(x), sums)
    return sums


@triton.jit(do_not_specialize=["rows", "row_blocks", "limit"])
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
    STAGES: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`GATED`: w is gate over up, each `width_out` rows, and the two products are joined.

    `scale_ptr` and `shift_ptr` are `[groups, padded_out]` words of `16 / BITS` numbers of x's kind.
    """
    GROUP: tl.constexpr = BLOCK_SIZE * (16 // BITS)
    TILE_WORDS: tl.constexpr = TILE_OUTPUTS * BLOCK_SIZE
    slot = tl.program_id(0)
    part = tl.program_id(1)
    m = (slot % row_blocks) * ROWS + tl.arange(0, ROWS)
    n = (slot // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_SIZE)
    per_part = tl.cdiv(groups, SPLIT)
    begin = part * per_part
    end = tl.minimum(begin + per_part, groups)
    tile = (n // TILE_OUTPUTS).to(tl.int64) * groups * TILE_WORDS
    w_ptrs = w_ptr + (tile + (n % TILE_OUTPUTS) * BLOCK_SIZE)[:, None] + i[None, :]
    up_offset = width_out.to(tl.int64) * groups * BLOCK_SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    used = (m < rows)[:, None]
    x_place = m[:, None] * x_stride
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        place = group * TILE_WORDS
        scale_place = group * padded_out + n
        words = tl.load(w_ptrs + place, eviction_policy="evict_first")
        scales = tl.load(scale_ptr + scale_place)
        shifts = scales
        if HAS_SHIFT:
            shifts = tl.load(shift_ptr + scale_place)
        sums = multiply_group(
            sums, x_ptr, x_place, used, words, scales, shifts, group * GROUP, width_in,
            ASM_0, ASM_1, ASM_2, ASM_3, BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, JOINED,
        )  # fmt: skip
        if GATED:
            words = tl.load(w_ptrs + up_offset + place, eviction_policy="evict_first")
            scales = tl.load(scale_ptr + width_out + scale_place)
            if HAS_SHIFT:
                shifts = tl.load(shift_ptr + width_out + scale_place)
            ups = multiply_group(
                ups, x_ptr, x_place, used, words, scales, shifts, group * GROUP, width_in,
                ASM_0, ASM_1, ASM_2, ASM_3, BITS, BLOCK_SIZE, HAS_SHIFT, IS_EVEN, JOINED,
            )  # fmt: skip
    store_sums(
        sums, ups, bias_ptr, out_ptr, part_ptr, counter_ptr, slot, part, m[None, :], n[:, None],
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
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ASM_0: tl.constexpr,
    ASM_1: tl.constexpr,
    ASM_2: tl.constexpr,
    ASM_3: tl.constexpr,
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
        w = _block_weights(words, scales, shifts, out_ptr, ASM_0, ASM_1, ASM_2, ASM_3, j, BITS, HAS_SHIFT)
        inside = (n < width_out)[:, None] & (k < width_in)[None, :]
        place = n.to(tl.int64)[:, None] * width_in + k[None, :]
        tl.store(out_ptr + place, w, mask=inside)
