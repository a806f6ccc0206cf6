# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention over the used pages of each session.

The pages that a row sees are cut into at most `SPLITS` parts, by the row's page alone; each part is summed up by
itself, and the parts are joined in their order. `attend_rows` is for few rows: every row is its own query, and at most
`PROGRAMS` programs share its parts, of which the last to finish joins them; one alone joins them as it goes.
`attend_blocks` is for long segments: a program takes the rows of one page, which have the same parts, for one head, and
walks the parts itself. All compute the same bits: verifying a draft, or a prompt in any pieces, is decoding token by
token.

Only what an order of summation cannot change is left to the compiler: sums along a page are products with ones.
"""

import triton
import triton.language as tl


@triton.jit
def _first_seen(position, window, IS_CHUNKED: tl.constexpr):
    """The first position of a row's chunk, or of its window, which may lie before 0."""
    return position // window * window if IS_CHUNKED else position + 1 - window


@triton.jit
def _score(q, keys, scale, softcap, HAS_CAP: tl.constexpr):
    """Scores in base 2."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores * 1.4426950408889634


@triton.jit
def _see(q, keys, values, visible, top, total, mixed, scale, softcap, HAS_CAP: tl.constexpr):
    """One page more: the highest score so far, and sums of weights `[rows, 16]`, all alike, and of weighted values."""
    scores = tl.where(visible, _score(q, keys, scale, softcap, HAS_CAP), float("-inf"))
    joint = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet (its window starts later) must not compute inf − inf.
    safe = tl.where(joint == float("-inf"), 0.0, joint)
    weights = tl.exp2(scores - safe[:, None]).to(values.dtype)
    fade = tl.exp2(top - safe)[:, None]
    ones = tl.full((values.shape[0], 16), 1.0, dtype=values.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    mixed = tl.dot(weights, values, mixed * fade, input_precision="ieee")
    return joint, total, mixed


@triton.jit
def _join(top, total, mixed, part_top, part_total, part_mixed):
    """One part more."""
    joint = tl.maximum(top, part_top)
    safe = tl.where(joint == float("-inf"), 0.0, joint)
    fade = tl.exp2(top - safe)
    part_fade = tl.exp2(part_top - safe)
    total = tl.fma(total, fade, part_total * part_fade)
    mixed = tl.fma(mixed, fade[:, None], part_mixed * part_fade[:, None])
    return joint, total, mixed


@triton.jit
def _one_of(total):
    """Of sums that are alike along the second axis: a power of two of them, so that no order matters."""
    return tl.sum(total, 1) * (1.0 / total.shape[1])


@triton.jit
def _cut_pages(
    position,
    last,
    window,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """What a row sees up to position `last`: its first page, the one behind its last, and how many pages a part has."""
    page = position // PAGE
    first_page = tl.maximum(_first_seen(page * PAGE, window, IS_CHUNKED), 0) // PAGE if HAS_WINDOW else 0
    stop = last // PAGE + 1
    return first_page, stop, tl.cdiv(stop - first_page, SPLITS)


@triton.jit
def _write(out_ptr, place, mixed, top, total, sinks_ptr, head, mask, HAS_SINKS: tl.constexpr):
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        joint = tl.maximum(top, sink)
        fade = tl.exp2(top - joint)
        total = tl.fma(total, fade, tl.exp2(sink - joint))
        mixed = mixed * fade[:, None]
    tl.store(out_ptr + place, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _see_part(
    q,
    pool_ptr,
    table_ptr,
    begin,
    end,
    kv_head,
    position,
    last,
    page_stride,
    value_offset,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """What the heads of one row see in pages `[begin, end)` of its table: highest scores, sums of weights and of
    weighted values."""
    ROWS: tl.constexpr = q.shape[0]
    D_BLOCK: tl.constexpr = q.shape[1]
    d = tl.arange(0, D_BLOCK)
    token = tl.arange(0, PAGE)
    inside = (d < HEAD_DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((ROWS, 16), dtype=tl.float32)
    mixed = tl.zeros((ROWS, D_BLOCK), dtype=tl.float32)
    for at in range(begin, end):
        page = tl.load(table_ptr + at).to(tl.int64)
        tile = page * page_stride + kv_head * PAGE * HEAD_DIM + token[:, None] * HEAD_DIM + d[None, :]
        seen = at * PAGE + token
        visible = seen <= last
        if HAS_WINDOW:
            visible = visible & (seen >= _first_seen(position, window, IS_CHUNKED))
        keys = tl.load(pool_ptr + tile, mask=visible[:, None] & inside, other=0.0)
        values = tl.load(pool_ptr + value_offset + tile, mask=visible[:, None] & inside, other=0.0)
        top, sums, mixed = _see(q, keys, values, visible[None, :], top, sums, mixed, scale, softcap, HAS_CAP)
    return top, _one_of(sums), mixed


@triton.jit
def attend_rows(
    q_ptr,
    pool_ptr,
    out_ptr,
    rows_ptr,
    position_ptr,
    end_ptr,
    owner_ptr,
    table_ptr,
    sinks_ptr,
    part_ptr,
    stat_ptr,
    counter_ptr,
    table_stride,
    page_stride,
    value_offset,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    listed = tl.load(rows_ptr + index) if HAS_ROWS else index
    row = tl.maximum(listed, 0)
    position = tl.load(position_ptr + row)
    last = tl.load(end_ptr + row) - 1 if HAS_ENDS else position
    owner = tl.load(owner_ptr + row)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_page, last_page, per_split = _cut_pages(
        position, last, window, PAGE, SPLITS, HAS_WINDOW, IS_CHUNKED
    )
    active = tl.cdiv(last_page - first_page, per_split)
    if HAS_ROWS:
        active = tl.where(listed < 0, 0, active)
    if split >= active:
        return

    group = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    head = kv_head * GROUP + tl.minimum(group, GROUP - 1)
    inside = (d < HEAD_DIM)[None, :]
    mask = (group < GROUP)[:, None] & inside
    place = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + place, mask=mask, other=0.0)
    if PROGRAMS == 1:
        top = tl.full((GROUP_BLOCK,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
        mixed = tl.zeros((GROUP_BLOCK, D_BLOCK), dtype=tl.float32)
        for begin in range(first_page, last_page, per_split):
            part_top, part_total, part_mixed = _see_part(
                q, pool_ptr, table_ptr + owner * table_stride, begin, tl.minimum(begin + per_split, last_page),
                kv_head, position, last, page_stride, value_offset, scale, softcap, window,
                HEAD_DIM, PAGE, HAS_CAP, HAS_WINDOW, IS_CHUNKED,
            )  # fmt: skip
            top, total, mixed = _join(top, total, mixed, part_top, part_total, part_mixed)
        _write(out_ptr, place, mixed, top, total, sinks_ptr, head, mask, HAS_SINKS)
        return

    owned = (index * KV_HEADS + kv_head) * SPLITS
    tile_place = group[:, None] * D_BLOCK + d[None, :]
    used = (group < GROUP)[:, None]
    stats = stat_ptr + owned * 2 * GROUP_BLOCK
    for part in range(split, active, PROGRAMS):
        begin = first_page + part * per_split
        top, total, mixed = _see_part(
            q, pool_ptr, table_ptr + owner * table_stride, begin, tl.minimum(begin + per_split, last_page),
            kv_head, position, last, page_stride, value_offset, scale, softcap, window,
            HEAD_DIM, PAGE, HAS_CAP, HAS_WINDOW, IS_CHUNKED,
        )  # fmt: skip
        if active == 1:
            _write(out_ptr, place, mixed, top, total, sinks_ptr, head, mask, HAS_SINKS)
        else:
            target = part_ptr + (owned + part).to(tl.int64) * GROUP * D_BLOCK + tile_place
            tl.store(target, mixed, mask=used)
            tl.store(stats + part * 2 * GROUP_BLOCK + group, top)
            tl.store(stats + (part * 2 + 1) * GROUP_BLOCK + group, total)

    if active > 1:
        tl.debug_barrier()
        counter = counter_ptr + index * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.minimum(active, PROGRAMS) - 1:
            tl.store(counter, 0)
            top = tl.full((GROUP_BLOCK,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
            mixed = tl.zeros((GROUP_BLOCK, D_BLOCK), dtype=tl.float32)
            for i in tl.range(0, active, num_stages=3):
                stat = stats + i * 2 * GROUP_BLOCK + group
                part_top = tl.load(stat, cache_modifier=".cg")
                part_total = tl.load(stat + GROUP_BLOCK, cache_modifier=".cg")
                source = part_ptr + (owned + i).to(tl.int64) * GROUP * D_BLOCK + tile_place
                piece = tl.load(source, mask=used, other=0.0, cache_modifier=".cg")
                top, total, mixed = _join(top, total, mixed, part_top, part_total, piece)
            _write(out_ptr, place, mixed, top, total, sinks_ptr, head, mask, HAS_SINKS)


@triton.jit
def attend_blocks(
    q_ptr,
    pool_ptr,
    out_ptr,
    block_ptr,
    position_ptr,
    end_ptr,
    owner_ptr,
    table_ptr,
    sinks_ptr,
    table_stride,
    page_stride,
    value_offset,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`block_ptr` holds (first row, rows) of each block; its rows lie in one page, and there may be none. With
    ends, all of its rows see as far, or none further than itself."""
    first_row = tl.load(block_ptr + 2 * tl.program_id(0))
    count = tl.load(block_ptr + 2 * tl.program_id(0) + 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count == 0:
        return
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    start = tl.load(position_ptr + first_row)
    owner = tl.load(owner_ptr + first_row)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_BLOCK)
    token = tl.arange(0, PAGE)
    inside = (d < HEAD_DIM)[None, :]
    mask = (m < count)[:, None] & inside
    place = ((first_row + m).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + place, mask=mask, other=0.0)
    here = start + m
    last = here
    furthest = start + count - 1
    if HAS_ENDS:
        last = tl.load(end_ptr + first_row + m, mask=m < count, other=0) - 1
        furthest = tl.load(end_ptr + first_row + count - 1) - 1
    first_page, last_page, per_split = _cut_pages(
        start, furthest, window, PAGE, SPLITS, HAS_WINDOW, IS_CHUNKED
    )
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, D_BLOCK), dtype=tl.float32)
    for begin in range(first_page, last_page, per_split):
        part_top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        part_sums = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
        part_mixed = tl.zeros((BLOCK_M, D_BLOCK), dtype=tl.float32)
        for at in range(begin, tl.minimum(begin + per_split, last_page)):
            page = tl.load(table_ptr + owner * table_stride + at).to(tl.int64)
            tile = page * page_stride + kv_head * PAGE * HEAD_DIM + token[:, None] * HEAD_DIM + d[None, :]
            seen = at * PAGE + token
            written = (seen <= furthest)[:, None] & inside
            keys = tl.load(pool_ptr + tile, mask=written, other=0.0)
            values = tl.load(pool_ptr + value_offset + tile, mask=written, other=0.0)
            visible = seen[None, :] <= last[:, None]
            if HAS_WINDOW:
                visible = visible & (seen[None, :] >= _first_seen(here, window, IS_CHUNKED)[:, None])
            part_top, part_sums, part_mixed = _see(
                q, keys, values, visible, part_top, part_sums, part_mixed, scale, softcap, HAS_CAP
            )
        top, total, mixed = _join(top, total, mixed, part_top, _one_of(part_sums), part_mixed)
    heads = head + tl.zeros((BLOCK_M,), dtype=tl.int32)
    _write(out_ptr, place, mixed, top, total, sinks_ptr, heads, mask, HAS_SINKS)
