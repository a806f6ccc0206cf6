# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Tokens in and out of a step: embedding rows, the best token of a row, and drawing one as the host's sampler does.

`draw_rows` is `picking.draw_rows` with one program for each row, which walks the vocabulary several times and sorts
nothing: the edges of top-k and top-p are searched for between the lowest logit that counts and the best one.
"""

import triton
import triton.language as tl

from shardcompute.backends.host.splitmix import GAMMA as _GAMMA
from shardcompute.backends.host.splitmix import MIX_A as _MIX_A
from shardcompute.backends.host.splitmix import MIX_B as _MIX_B
from shardcompute.backends.torch.picking import UNSURE_MASS as _MASS
from shardcompute.backends.torch.picking import UNSURE_NOISE as _NOISE

GAMMA, MIX_A, MIX_B = tl.constexpr(_GAMMA), tl.constexpr(_MIX_A), tl.constexpr(_MIX_B)
UNSURE_MASS, UNSURE_NOISE = tl.constexpr(_MASS), tl.constexpr(_NOISE)
LOWEST_KEY = tl.constexpr(-2139095040)
"""Of the lowest finite number, see `_key`."""


@triton.jit
def embed_rows(
    id_ptr,
    picked_ptr,
    table_ptr,
    out_ptr,
    width,
    PICKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of the table for each id; ids from `PICKED` down name a slot of tokens that were picked."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(id_ptr + row).to(tl.int64)
    if token < 0:
        token = tl.load(picked_ptr + (PICKED - token))
    x = tl.load(table_ptr + token * width + at, mask=at < width)
    tl.store(out_ptr + row.to(tl.int64) * width + at, x, mask=at < width)


@triton.jit(do_not_specialize=["vocab_size"])
def pick_best(
    logit_ptr,
    slot_ptr,
    picked_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    vocab_size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best logit of each row (NaN where there is one) and the lowest token that has it: to `out [rows, 2]` in
    float64, and the token to its slot. `PARTS` programs share a row; the last one joins what they found."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    per_part = tl.cdiv(tl.cdiv(vocab_size, BLOCK), PARTS) * BLOCK
    begin = part * per_part
    tops = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    tokens = tl.zeros((BLOCK,), dtype=tl.int32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(begin, tl.minimum(begin + per_part, vocab_size), BLOCK):
        token = start + at
        x = tl.load(
            logit_ptr + row.to(tl.int64) * vocab_size + token,
            mask=token < vocab_size,
            other=float("-inf"),
        )
        is_higher = x > tops
        tops = tl.where(is_higher, x, tops)
        tokens = tl.where(is_higher, token, tokens)
        broken |= (x != x).to(tl.int32)
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, tokens, vocab_size), 0)
    # A row without a finite logit has its first token, as long as nobody asks for it.
    token = tl.where(top == float("-inf"), 0, token)
    top = tl.where(tl.max(broken, 0) > 0, float("nan"), top)
    mine = part_ptr + row * PARTS * 2
    tl.store(mine + part, top)
    tl.store(mine + PARTS + part, token.to(tl.float32, bitcast=True))
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(counter_ptr + row, 0)
        each = tl.arange(0, PARTS)
        found = tl.load(mine + each, cache_modifier=".cg")
        found_tokens = tl.load(mine + PARTS + each, cache_modifier=".cg").to(tl.int32, bitcast=True)
        is_broken = tl.max((found != found).to(tl.int32), 0) > 0
        top = tl.max(tl.where(found != found, float("-inf"), found), 0)
        token = tl.min(tl.where(found == top, found_tokens, vocab_size), 0)
        token = tl.where(token == vocab_size, 0, token)
        top = tl.where(is_broken, float("nan"), top)
        tl.store(out_ptr + 2 * row, top.to(tl.float64))
        tl.store(out_ptr + 2 * row + 1, token.to(tl.float64))
        tl.store(picked_ptr + tl.load(slot_ptr + row), token.to(tl.int64))


@triton.jit
def _key(x):
    """Whole numbers in the order of these float32 numbers; equal zeros are made so first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, best, rate):
    """e to the score, the best one's being 1, good enough for sums: `rate` is 1 / (temperature · ln 2)."""
    return tl.exp2((x - best) * rate)


@triton.jit
def _count_from(logit_ptr, edge, best, rate, vocab_size, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """How many logits have the key `edge` or a higher one; with `BY_MASS` their weights' sum instead."""
    at = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), dtype=tl.float64 if BY_MASS else tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logit_ptr + start + at, mask=start + at < vocab_size, other=float("-inf"))
        is_counted = _key(x) >= edge
        if BY_MASS:
            counts += tl.where(is_counted, _weight(x, best, rate), 0.0).to(tl.float64)
        else:
            counts += is_counted.to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _search(logit_ptr, low, high, wanted, best, rate, vocab_size, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The highest key in [low, high] from which on there are so many logits, or so much mass, if `low` has that."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        is_enough = _count_from(logit_ptr, middle, best, rate, vocab_size, BLOCK, BY_MASS) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _noise(key, token):
    """`decoding.noise.gumbel_noise` of a token."""
    z = (token + 1).to(tl.uint64) * GAMMA + key
    z = (z ^ (z >> 30)) * MIX_A
    z = (z ^ (z >> 27)) * MIX_B
    z = z ^ (z >> 31)
    bits = (z >> 12) | 0x3FF0000000000000
    value = bits.to(tl.float64, bitcast=True) - tl.full((), 1.0 - 2.0**-53, tl.float64)
    return -tl.log(-tl.log(value))


@triton.jit
def _is_near(a, b, total):
    return tl.abs(a - b) <= total * tl.full((), UNSURE_MASS, tl.float64)


@triton.jit(do_not_specialize=["vocab_size"])
def draw_rows(logit_ptr, rule_ptr, picked_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr):
    """`rule [rows, 7]` are 64 bits each: temperature, reach, top-p, least score (float64), top-k, key, slot.
    To `out [rows, 2]`, int64: the token, and whether it is unsure."""
    row = tl.program_id(0).to(tl.int64)
    logit_ptr += row * vocab_size
    rule_ptr += row * 7
    temperature = tl.load(rule_ptr).to(tl.float64, bitcast=True).to(tl.float32)
    reach = tl.load(rule_ptr + 1).to(tl.float64, bitcast=True)
    top_p = tl.load(rule_ptr + 2).to(tl.float64, bitcast=True)
    least_score = tl.load(rule_ptr + 3).to(tl.float64, bitcast=True).to(tl.float32)
    top_k = tl.load(rule_ptr + 4)
    key = tl.load(rule_ptr + 5).to(tl.uint64, bitcast=True)
    at = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logit_ptr + start + at, mask=start + at < vocab_size, other=float("-inf"))
        tops = tl.maximum(tops, x)
        broken |= (x != x).to(tl.int32)
    best = tl.max(tops, 0)
    is_broken = (tl.max(broken, 0) > 0) | (tl.abs(best) == float("inf"))
    best = tl.where(is_broken, 0.0, best)
    # One step lower, so that rounding drops no token that could win; finite, as -inf forbids a token.
    edge = tl.maximum(_key((best.to(tl.float64) - reach).to(tl.float32)) - 1, LOWEST_KEY)
    highest = tl.where(is_broken, edge, _key(best))
    missing = vocab_size + 0
    unsure = is_broken
    rate = 1.4426950408889634 / temperature
    is_cut = top_k < 0
    if top_k > 0:
        is_cut = top_k < _count_from(logit_ptr, edge, best, rate, vocab_size, BLOCK, False)
    if is_cut:
        edge = _search(logit_ptr, edge, highest, top_k, best, rate, vocab_size, BLOCK, False)
        above = _count_from(logit_ptr, edge.to(tl.int64) + 1, best, rate, vocab_size, BLOCK, False)
        missing = (top_k - above).to(tl.int32)
    if top_p < 1.0:
        total = _count_from(logit_ptr, edge, best, rate, vocab_size, BLOCK, True)
        if is_cut:
            total = _count_from(logit_ptr, edge.to(tl.int64) + 1, best, rate, vocab_size, BLOCK, True)
            total += _weight(_number(edge), best, rate).to(tl.float64) * missing.to(tl.float64)
        target = top_p * total
        reached = _search(logit_ptr, edge, highest, target, best, rate, vocab_size, BLOCK, True)
        mass = _count_from(logit_ptr, reached.to(tl.int64) + 1, best, rate, vocab_size, BLOCK, True)
        weight = _weight(_number(reached), best, rate).to(tl.float64)
        wanted = tl.maximum(tl.ceil((target - mass) / weight), 1.0)
        unsure |= _is_near(mass + wanted * weight, target, total)
        unsure |= _is_near(mass + (wanted - 1.0) * weight, target, total)
        unsure |= (reached == edge) & (wanted > missing.to(tl.float64))
        missing = tl.minimum(wanted, vocab_size.to(tl.float64)).to(tl.int32)
        edge = reached
    first = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    second = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    tokens = tl.zeros((BLOCK,), dtype=tl.int32)
    equals = 0
    for start in range(0, vocab_size, BLOCK):
        token = start + at
        x = tl.load(logit_ptr + token, mask=token < vocab_size, other=float("-inf"))
        place = _key(x)
        is_edge = (place == edge).to(tl.int32)
        is_kept = (place > edge) | ((is_edge > 0) & (equals + tl.cumsum(is_edge, 0) <= missing))
        equals += tl.sum(is_edge, 0)
        score = tl.div_rn(x - best, temperature)
        is_kept = is_kept & (token < vocab_size) & (score >= least_score)
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            noisy = tl.where(is_kept, _noise(key, token) + score.to(tl.float64), float("-inf"))
            second = tl.maximum(second, tl.minimum(first, noisy))
            tokens = tl.where(noisy > first, token, tokens)
            first = tl.maximum(first, noisy)
    winning = tl.max(first, 0)
    winner = tl.min(tl.where(first == winning, tokens, vocab_size), 0)
    next_best = tl.max(tl.where((first == winning) & (tokens == winner), second, first), 0)
    unsure |= ~(next_best < winning - tl.full((), UNSURE_NOISE, tl.float64))
    winner = tl.where(winner == vocab_size, 0, winner).to(tl.int64)
    tl.store(out_ptr + 2 * row, winner)
    tl.store(out_ptr + 2 * row + 1, unsure.to(tl.int64))
    tl.store(picked_ptr + tl.load(rule_ptr + 6), winner)
