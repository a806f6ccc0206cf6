# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention over the used pages of each session.

`attend_rows` is for few rows: every row is its own query, so verifying a draft gives exactly what decoding gives.
The pages of a row are cut into at most `SPLITS` parts by its length alone, which at most `PROGRAMS` programs share, and
the last to finish joins the parts in their order. `attend_blocks` is for long segments: a program takes `BLOCK_M` rows
of one head.
"""

import triton
import triton.language as tl


@triton.jit
def _score(q, keys, scale, softcap, HAS_CAP: tl.constexpr):
    """Scores in base 2."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores * 1.4426950408889634


@triton.jit
def _write(out_ptr, place, mixed, top, total, sinks_ptr, head, mask, HAS_SINKS: tl.constexpr):
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        joint = tl.maximum(top, sink)
        fade = tl.exp2(top - joint)
        total = total * fade + tl.exp2(sink - joint)
        mixed = mixed * fade[:, None]
    tl.store(out_ptr + place, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend_rows(
    q_ptr,
    pool_ptr,
    out_ptr,
    rows_ptr,
    position_ptr,
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
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
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
    owner = tl.load(owner_ptr + row)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    last_page = position // PAGE + 1
    first_page = tl.maximum(position + 1 - window, 0) // PAGE if HAS_WINDOW else 0
    per_split = tl.cdiv(last_page - first_page, SPLITS)
    active = tl.cdiv(last_page - first_page, per_split)
    if HAS_ROWS:
        active = tl.where(listed < 0, 0, active)
    if split >= active:
        return

    group = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    token = tl.arange(0, PAGE)
    head = kv_head * GROUP + tl.minimum(group, GROUP - 1)
    inside = (d < HEAD_DIM)[None, :]
    mask = (group < GROUP)[:, None] & inside
    place = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + place, mask=mask, other=0.0)
    owned = (index * KV_HEADS + kv_head) * SPLITS
    tile_place = group[:, None] * D_BLOCK + d[None, :]
    used = (group < GROUP)[:, None]
    stats = stat_ptr + owned * 2 * GROUP_BLOCK
    for part in range(split, active, PROGRAMS):
        top = tl.full((GROUP_BLOCK,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((GROUP_BLOCK,), dtype=tl.float32)
        mixed = tl.zeros((GROUP_BLOCK, D_BLOCK), dtype=tl.float32)
        begin = first_page + part * per_split
        for at in range(begin, tl.minimum(begin + per_split, last_page)):
            page = tl.load(table_ptr + owner * table_stride + at).to(tl.int64)
            tile = page * page_stride + kv_head * PAGE * HEAD_DIM + token[:, None] * HEAD_DIM + d[None, :]
            seen = at * PAGE + token
            visible = seen <= position
            if HAS_WINDOW:
                visible = visible & (seen > position - window)
            keys = tl.load(pool_ptr + tile, mask=visible[:, None] & inside, other=0.0)
            values = tl.load(pool_ptr + value_offset + tile, mask=visible[:, None] & inside, other=0.0)
            scores = tl.where(visible[None, :], _score(q, keys, scale, softcap, HAS_CAP), float("-inf"))
            joint = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - joint[:, None])
            fade = tl.exp2(top - joint)
            total = total * fade + tl.sum(weights, 1)
            mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
            top = joint
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
                joint = tl.maximum(top, part_top)
                fade = tl.exp2(top - joint)
                part_fade = tl.exp2(part_top - joint)
                total = total * fade + part_total * part_fade
                mixed = mixed * fade[:, None] + piece * part_fade[:, None]
                top = joint
            _write(out_ptr, place, mixed, top, total, sinks_ptr, head, mask, HAS_SINKS)


@triton.jit
def attend_blocks(
    q_ptr,
    pool_ptr,
    out_ptr,
    block_ptr,
    position_ptr,
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
    BLOCK_M: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`block_ptr` holds (first row, rows) of each block; a block lies in one segment, and may have no rows."""
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
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, D_BLOCK), dtype=tl.float32)
    first_page = tl.maximum(start + 1 - window, 0) // PAGE if HAS_WINDOW else 0
    for at in range(first_page, (start + count - 1) // PAGE + 1):
        page = tl.load(table_ptr + owner * table_stride + at).to(tl.int64)
        tile = page * page_stride + kv_head * PAGE * HEAD_DIM + token[:, None] * HEAD_DIM + d[None, :]
        seen = at * PAGE + token
        written = (seen < start + count)[:, None] & inside
        keys = tl.load(pool_ptr + tile, mask=written, other=0.0)
        values = tl.load(pool_ptr + value_offset + tile, mask=written, other=0.0)
        visible = seen[None, :] <= here[:, None]
        if HAS_WINDOW:
            visible = visible & (seen[None, :] > here[:, None] - window)
        scores = tl.where(visible, _score(q, keys, scale, softcap, HAS_CAP), float("-inf"))
        joint = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet (its window starts later) must not compute inf − inf.
        safe = tl.where(joint == float("-inf"), 0.0, joint)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
        top = joint
    heads = head + tl.zeros((BLOCK_M,), dtype=tl.int32)
    _write(out_ptr, place, mixed, top, total, sinks_ptr, heads, mask, HAS_SINKS)
