"""The kernels of `dflash.attention.triton`: what one program computes, in tiles of queries and keys.

A slot of block i reads two ranges of keys: context tokens [low, anchor), low being the first token of the anchor's
document or what the window leaves of it, and the slots of its own block. A tile of queries therefore meets one range
of context keys, whose middle every one of its rows sees in full. Only the ends of that range are masked.

Names: r row of the batch, h head, s slot, t token of context; M queries and KEYS keys a tile, D head dimension, B
slots a block. Scores are kept in units of log2, so that exp2, the one exponential the hardware has, is enough.
Accumulators and softmax are float32, products of whatever type q, k and v have (their operands in that type).
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

# What a hidden score is, and the largest of a row that has seen nothing yet. Finite, so that there is no NaN, and far
# apart: exp2(HIDDEN * scale - NOTHING) is 0 whatever the scale, while the difference of two equal hidden scores is that
# of their roundings where the compiler fuses product and difference, and its exp2 may be infinite.
HIDDEN = tl.constexpr(-1.0e30)
NOTHING = tl.constexpr(-1.0e20)


@triton.jit
def _slots(anchor, first, row, slot, blocks, window, B: tl.constexpr):
    """What slots see of the context, as [low, high), and their blocks; high -1: an empty block or no slot at all."""
    block = slot // B
    there = block < blocks
    high = tl.load(anchor + row * blocks + block, mask=there, other=-1)
    start = tl.load(first + row * blocks + block, mask=there, other=0)
    return tl.maximum(start, high + slot % B - window + 1), high, block


@triton.jit
def key_tile_ranges(anchor, first, out, blocks, window, KEYS: tl.constexpr, M: tl.constexpr, B: tl.constexpr):
    """For each key tile the query tiles (of M slots of one head) that see of it: [begin, all_begin, all_end, end).

    Tiles of [all_begin, all_end) see all of it. anchor and first int32 [R, N], out int32 [R, key tiles, 4]. With
    sorted anchors both are one range. Were they not sorted, the outer one would hold tiles that see nothing, which
    costs time, and the inner one is given up as soon as one block of it sees only a part.
    """
    CHUNK: tl.constexpr = 1024
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key = tile * KEYS
    begin, end, all_begin, all_end, whole = blocks, 0, blocks, 0, 0
    for chunk in range(0, blocks, CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        low, high, _ = _slots(anchor, first, row, block * B, blocks, window, B)
        last_low = tl.maximum(low, high + B - window)  # of the last slot, which a window leaves least
        some = (low < high) & (low < key + KEYS) & (high > key)
        all_ = (high >= key + KEYS) & (last_low <= key)
        begin = tl.minimum(begin, tl.min(tl.where(some, block, blocks)))
        end = tl.maximum(end, tl.max(tl.where(some, block + 1, 0)))
        all_begin = tl.minimum(all_begin, tl.min(tl.where(all_, block, blocks)))
        all_end = tl.maximum(all_end, tl.max(tl.where(all_, block + 1, 0)))
        whole += tl.sum(all_.to(tl.int32))
    gap = whole != all_end - all_begin
    begin, end = begin * B // M, tl.cdiv(end * B, M)
    all_begin, all_end = tl.cdiv(all_begin * B, M), all_end * B // M
    none = gap | (all_begin >= all_end)
    begin = tl.minimum(begin, end)
    all_begin, all_end = tl.where(none, end, all_begin), tl.where(none, end, all_end)
    at = out + (row * tl.num_programs(0) + tile) * 4
    tl.store(at, begin)
    tl.store(at + 1, all_begin)
    tl.store(at + 2, all_end)
    tl.store(at + 3, end)


@triton.jit
def _context_tiles(low, high, KEYS: tl.constexpr):
    """The key tiles of a query tile: where they start, how many, and those [a, b) that every row sees in full."""
    sees = low < high
    start = tl.min(tl.where(sees, low, 1 << 30))
    end = tl.max(tl.where(sees, high, 0))
    count = tl.where(start < end, tl.cdiv(end - start, KEYS), 0)
    inner, outer = tl.max(low), tl.min(high)  # a row that sees nothing has high <= low: then there is no such tile
    a = tl.where(start < end, tl.cdiv(inner - start, KEYS), 0)
    b = tl.where(start < outer, (outer - start) // KEYS, 0)
    none = (a >= b) | (start >= end)
    return start, count, tl.where(none, count, a), tl.where(none, count, b)


@triton.jit
def _own_tiles(slot, SLOTS: tl.constexpr, context, slots, KEYS: tl.constexpr, B: tl.constexpr):
    """The key tiles with the blocks of SLOTS slots from `slot` on: the first key and how many tiles."""
    first, last = slot // B, (tl.minimum(slot + SLOTS, slots) - 1) // B
    return context + first * B, tl.cdiv((last + 1 - first) * B, KEYS)


@triton.jit
def _masked_tile(i, start, a, b, own_start, own_count, context, low, high, block, KEYS: tl.constexpr, B: tl.constexpr):
    """The i-th masked key tile of a query tile, of own_count + count - (b - a): first key, and who sees what of it."""
    own = i < own_count
    j = i - own_count
    j = tl.where(j < a, j, j + b - a)
    key = tl.where(own, own_start + i * KEYS, start + j * KEYS)
    own_low = context + block * B
    low = tl.where(own, own_low, low)
    high = tl.where(high < 0, 0, tl.where(own, own_low + B, high))
    keys = key + tl.arange(0, KEYS)
    return key, (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])


@triton.jit
def _read(desc, row, head, at, KEYS: tl.constexpr, D: tl.constexpr):
    return desc.load([row, head, at, 0]).reshape(KEYS, D)


@triton.jit
def _soften(scores, scale, top, total, acc):
    """One step of the running softmax: probabilities of a tile, and what was gathered so far on the new scale."""
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - new[:, None])
    fade = tl.exp2(top - new)
    return p, new, total * fade + tl.sum(p, 1), acc * fade[:, None]


@triton.jit
def longest_keys(keys, out, length, KEYS: tl.constexpr, D: tl.constexpr):
    """The square of the longest key's norm, float32 [R, Hkv], which must hold zeros before."""
    tile, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    longest = 0.0
    for at in range(tile * KEYS, length, tl.num_programs(0) * KEYS):
        k = _read(keys, row, key_head, at, KEYS, D).to(tl.float32)
        longest = tl.maximum(longest, tl.max(tl.sum(k * k, 1)))
    tl.atomic_max(out + row * tl.num_programs(1) + key_head, longest)


@triton.jit
def forward(
    q, keys, values, out, lse, anchor, first, longest_key, source, begun, begun_lse, place,
    q_r, q_h, q_s, o_r, o_h, o_s, b_r, b_h, b_s,
    group, context, slots, padded_slots, blocks, window, scale, limit,
    M: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [R, Hq, Q, D] and lse float32 [R, Hq, padded Q], in log2 and +inf where a slot sees nothing.

    A tile holds PACK query heads of one key head times M / PACK slots: its rows then share few anchors, and hardly a
    key tile but the last is partly hidden. The last tiles come first, since late anchors see most.

    With `source` int32 [R, Q] a row's query is that of slot source[r, s], and no keys of its own block belong to it
    (alike.py: then B is 1). A row that sees nothing gives 0 and NOTHING. With `begun`, `begun_lse` and `place` int32
    [R, Q] a row goes on from line place[r, s] of what such a call gave.

    Softmax needs its maximum only so that nothing overflows. No score exceeds |q| |k|; where that bound, with the
    longest key of `longest_keys`, stays below `limit`, the tiles that are seen in full do without a maximum and
    without scaling what was gathered, a third of the loop's instructions. q_norm and k_norm keep a drafter there
    as long as the product of their weights stays below about 4.
    """
    SLOTS: tl.constexpr = M // PACK
    packs = group // PACK
    tile, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2).to(tl.int64)
    key_head = tl.program_id(1) // packs
    head = (key_head * group + tl.program_id(1) % packs * PACK + tl.arange(0, M) // SLOTS).to(tl.int64)
    slot = tile * SLOTS + tl.arange(0, M) % SLOTS
    low, high, block = _slots(anchor, first, row, slot, blocks, window, B)
    start, count, a, b = _context_tiles(low, high, KEYS)
    there = slot < slots
    asks = slot
    own_start, own_count = context, 0
    if source is None:
        own_start, own_count = _own_tiles(tile * SLOTS, SLOTS, context, slots, KEYS, B)
    else:
        there = there & (high >= 0)
        asks = tl.load(source + row * slots + slot, mask=there, other=0)

    d = tl.arange(0, D)
    at = q + row * q_r + head * q_h + asks.to(tl.int64) * q_s
    query = tl.load(at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    longest = tl.max(tl.sum(query.to(tl.float32) * query.to(tl.float32), 1))
    bound = tl.sqrt(longest * tl.load(longest_key + row * (tl.num_programs(1) // packs) + key_head)) * scale
    lines = (row * (tl.num_programs(1) * PACK) + head) * padded_slots
    if begun is None:
        top = tl.full([M], NOTHING, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
    else:
        known = tl.load(place + row * slots + slot, mask=there, other=0)
        top = tl.load(begun_lse + lines + known, mask=there, other=0.0)
        total = tl.full([M], 1.0, tl.float32)
        at = begun + row * b_r + head * b_h + known.to(tl.int64) * b_s
        acc = tl.load(at[:, None] + d[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    r = row.to(tl.int32)
    for i in tl.range(0, own_count + count - (b - a)):
        key, seen = _masked_tile(i, start, a, b, own_start, own_count, context, low, high, block, KEYS, B)
        k = _read(keys, r, key_head, key, KEYS, D)
        scores = tl.dot(query, k.T, input_precision=PRECISION)
        scores = tl.where(seen, scores, HIDDEN)
        p, top, total, acc = _soften(scores, scale, top, total, acc)
        v = _read(values, r, key_head, key, KEYS, D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    bounded = bound <= limit
    middle = tl.where(bounded, a, b)
    for j in tl.range(a, middle):
        k = _read(keys, r, key_head, start + j * KEYS, KEYS, D)
        scores = tl.dot(query, k.T, input_precision=PRECISION)
        p, top, total, acc = _soften(scores, scale, top, total, acc)
        v = _read(values, r, key_head, start + j * KEYS, KEYS, D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    shift = tl.where(bounded, top, 0.0)
    top -= shift
    shift = tl.exp2(shift)
    total, acc = total * shift, acc * shift[:, None]
    for j in tl.range(middle, b):
        k = _read(keys, r, key_head, start + j * KEYS, KEYS, D)
        p = tl.exp2(tl.dot(query, k.T, input_precision=PRECISION) * scale)
        total += tl.sum(p, 1)
        v = _read(values, r, key_head, start + j * KEYS, KEYS, D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    empty = high < 0 if source is None else low >= high
    acc = tl.where(empty[:, None], 0.0, acc / total[:, None])
    at = out + row * o_r + head * o_h + slot.to(tl.int64) * o_s
    tl.store(at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=there[:, None])
    none: tl.constexpr = float("inf") if source is None else NOTHING
    tl.store(lse + lines + slot, tl.where(empty, none, top + tl.log2(total)), mask=there)


@triton.jit
def own_backward(
    q, keys, values, out, grad, lse, anchor, delta, dk, dv,
    q_r, q_h, q_s, k_r, k_h, k_t, v_r, v_h, v_t, o_r, o_h, o_s, g_r, g_h, g_s, dk_r, dk_h, dk_t, dv_r, dv_h, dv_t,
    group, context, slots, padded_slots, blocks, scale, softmax_scale,
    P: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * grad), float32 [R, Hq, padded Q], and the dk and dv of block slots, PER blocks a program.

    Nobody but a block's own slots sees these keys, so they are complete here. P >= PER * B rows are computed.
    """
    tile, key_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, d = tl.arange(0, P), tl.arange(0, D)
    slot = tile * PER * B + i
    block = slot // B
    there = (i < PER * B) & (slot < slots)
    full = tl.load(anchor + row * blocks + block, mask=there, other=-1) >= 0
    seen = (block[:, None] == block[None, :]) & full[:, None] & there[None, :]
    at, mask = slot.to(tl.int64)[:, None], there[:, None]
    own = context + at
    k = tl.load(keys + row * k_r + key_head * k_h + own * k_t + d[None, :], mask=mask, other=0.0)
    v = tl.load(values + row * v_r + key_head * v_h + own * v_t + d[None, :], mask=mask, other=0.0)
    dk_acc = tl.zeros([P, D], tl.float32)
    dv_acc = tl.zeros([P, D], tl.float32)
    heads = tl.num_programs(1) * group
    for g in range(group):
        head = key_head * group + g
        query = tl.load(q + row * q_r + head * q_h + at * q_s + d[None, :], mask=mask, other=0.0)
        o = tl.load(out + row * o_r + head * o_h + at * o_s + d[None, :], mask=mask, other=0.0)
        do = tl.load(grad + row * g_r + head * g_h + at * g_s + d[None, :], mask=mask, other=0.0)
        line = (row * heads + head) * padded_slots + slot
        sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(delta + line, sums, mask=there)
        norm = tl.load(lse + line, mask=there, other=float("inf"))
        p = tl.exp2(tl.dot(query, k.T, input_precision=PRECISION) * scale - norm[:, None])
        p = tl.where(seen, p, 0.0)
        dv_acc = tl.dot(p.to(do.dtype).T, do, dv_acc, input_precision=PRECISION)
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - sums[:, None])
        dk_acc = tl.dot(ds.to(query.dtype).T, query, dk_acc, input_precision=PRECISION)
    dk_acc = (dk_acc * softmax_scale).to(dk.dtype.element_ty)
    tl.store(dk + row * dk_r + key_head * dk_h + own * dk_t + d[None, :], dk_acc, mask=mask)
    dv_acc = dv_acc.to(dv.dtype.element_ty)
    tl.store(dv + row * dv_r + key_head * dv_h + own * dv_t + d[None, :], dv_acc, mask=mask)


@triton.jit
def _key_gradients(
    tile, key, k, v, dk, dv, seen_by, queries, grads, lse, delta, row, head, scale,
    M: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one query tile adds to a key tile's dk and dv.

    Scores stand keys by queries here, so that p and ds can stay in registers as left operands of dv and dk.
    """
    query = _read(queries, row, head, tile * M, M, D)
    norm = lse.load([row, head, tile * M]).reshape(M)
    p = tl.exp2(tl.dot(k, query.T, input_precision=PRECISION) * scale - norm[None, :])
    if MASKED:
        low, high = seen_by
        keys = key + tl.arange(0, KEYS)
        p = tl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), p, 0.0)
    do = _read(grads, row, head, tile * M, M, D)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    sums = delta.load([row, head, tile * M]).reshape(M)
    if MASKED:
        sums = tl.where(high < 0, 0.0, sums)  # nobody wrote those past the last slot, and 0 * NaN is NaN
    ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - sums[None, :])
    return tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION), dv


@triton.jit
def context_backward(
    queries, keys, values, grads, lse, delta, anchor, first, ranges, dk, dv,
    dk_r, dk_h, dk_t, dv_r, dv_h, dv_t,
    group, context, blocks, window, scale, softmax_scale,
    M: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dk and dv of the context's keys, a tile of them a program, over the query tiles in `ranges`; ADD: added.

    The first keys come first: in a document they are seen most.
    """
    tile, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = tile * KEYS
    k = _read(keys, row, key_head, key, KEYS, D)
    v = _read(values, row, key_head, key, KEYS, D)
    dk_acc = tl.zeros([KEYS, D], tl.float32)
    dv_acc = tl.zeros([KEYS, D], tl.float32)
    at = ranges + (row * tl.num_programs(0) + tile) * 4
    begin, all_begin, all_end, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    early = all_begin - begin
    masked = early + end - all_end
    whole = all_end - all_begin
    # One loop over heads and tiles together: short ranges would else refill the pipeline for every head.
    for i in tl.range(0, masked * group):
        head = key_head * group + i // masked
        j = i % masked
        j = tl.where(j < early, begin + j, all_end + j - early)
        low, high, _ = _slots(anchor, first, row, j * M + tl.arange(0, M), blocks, window, B)
        dk_acc, dv_acc = _key_gradients(
            j, key, k, v, dk_acc, dv_acc, (low, high), queries, grads, lse, delta, row, head, scale,
            M, KEYS, D, PRECISION, True,
        )  # fmt: skip
    for i in tl.range(0, whole * group):
        head = key_head * group + i // whole
        dk_acc, dv_acc = _key_gradients(
            all_begin + i % whole, key, k, v, dk_acc, dv_acc, None, queries, grads, lse, delta, row, head, scale,
            M, KEYS, D, PRECISION, False,
        )  # fmt: skip
    t = (key + tl.arange(0, KEYS)).to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    mask = t < context  # the keys after it are block slots, whose gradients own_backward wrote
    dk += row.to(tl.int64) * dk_r + key_head.to(tl.int64) * dk_h
    dv += row.to(tl.int64) * dv_r + key_head.to(tl.int64) * dv_h
    dk_acc *= softmax_scale
    if ADD:
        dk_acc += tl.load(dk + t * dk_t + d, mask=mask, other=0.0).to(tl.float32)
        dv_acc += tl.load(dv + t * dv_t + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(dk + t * dk_t + d, dk_acc.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + t * dv_t + d, dv_acc.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def query_backward(
    q, keys, values, grad, lse, delta, anchor, first, dq, source,
    q_r, q_h, q_s, g_r, g_h, g_s, dq_r, dq_h, dq_s,
    group, context, slots, padded_slots, blocks, window, scale, softmax_scale,
    M: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, over the same tiles as `forward`; with `source` added to that of the slots there, no two of them alike.

    A pass of its own makes the scores a second time, seven products instead of five. Adding every key tile's part to
    dq atomically in context_backward instead was slower on an H200 (docs/STRATEGIES.md), and its order is random.
    """
    SLOTS: tl.constexpr = M // PACK
    packs = group // PACK
    tile, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2).to(tl.int64)
    key_head = tl.program_id(1) // packs
    head = (key_head * group + tl.program_id(1) % packs * PACK + tl.arange(0, M) // SLOTS).to(tl.int64)
    slot = tile * SLOTS + tl.arange(0, M) % SLOTS
    low, high, block = _slots(anchor, first, row, slot, blocks, window, B)
    start, count, a, b = _context_tiles(low, high, KEYS)
    d, there = tl.arange(0, D), slot < slots
    own_start, own_count = context, 0
    if source is None:
        own_start, own_count = _own_tiles(tile * SLOTS, SLOTS, context, slots, KEYS, B)
    else:
        there = there & (high >= 0)
    mask = there[:, None]
    at = slot.to(tl.int64)
    line = (row * (tl.num_programs(1) * PACK) + head) * padded_slots + slot
    query = tl.load((q + row * q_r + head * q_h + at * q_s)[:, None] + d[None, :], mask=mask, other=0.0)
    do = tl.load((grad + row * g_r + head * g_h + at * g_s)[:, None] + d[None, :], mask=mask, other=0.0)
    acc = tl.zeros([M, D], tl.float32)
    norm = tl.load(lse + line, mask=there, other=float("inf"))
    sums = tl.load(delta + line, mask=there, other=0.0)
    r = row.to(tl.int32)
    for i in tl.range(0, own_count + count - (b - a)):
        key, seen = _masked_tile(i, start, a, b, own_start, own_count, context, low, high, block, KEYS, B)
        k = _read(keys, r, key_head, key, KEYS, D)
        p = tl.exp2(tl.dot(query, k.T, input_precision=PRECISION) * scale - norm[:, None])
        p = tl.where(seen, p, 0.0)
        v = _read(values, r, key_head, key, KEYS, D)
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - sums[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    for j in tl.range(a, b):
        k = _read(keys, r, key_head, start + j * KEYS, KEYS, D)
        p = tl.exp2(tl.dot(query, k.T, input_precision=PRECISION) * scale - norm[:, None])
        v = _read(values, r, key_head, start + j * KEYS, KEYS, D)
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - sums[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    acc *= softmax_scale
    if source is None:
        at = (dq + row * dq_r + head * dq_h + at * dq_s)[:, None] + d[None, :]
    else:
        at = tl.load(source + row * slots + slot, mask=there, other=0).to(tl.int64)
        at = (dq + row * dq_r + head * dq_h + at * dq_s)[:, None] + d[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def gather_alike(
    q, grad, lse, delta, begun_lse, bound, source, gap, out_q, out_grad, out_delta,
    q_r, q_h, q_s, g_r, g_h, g_s, o_r, o_h, o_s,
    heads, slots, padded_slots, blocks,
    HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """What stands for all slots with one query in the backward of the context they share (alike.py).

    Line j gets the query of slot source[r, j], and the weighted sums of `grad` and `delta` over it and the slots of
    later blocks at the same token: slot k of block i is slot k - gap[r, i + 1] of the next one. gap int32 [R, N + 1].
    Lines that stand for nobody are zeros as far as a tile of M reaches, unwritten behind it.
    """
    line, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(bound + row * slots + line // M * M) >= 0:
        real = tl.load(bound + row * slots + line) >= 0
        slot = tl.load(source + row * slots + line)
        head, d = tl.arange(0, HEADS).to(tl.int64), tl.arange(0, D)
        there = head < heads
        inside = there[:, None] & (d >= 0)[None, :]
        asking = head < tl.where(real, heads, 0)
        mask = asking[:, None] & (d >= 0)[None, :]
        at = slot.to(tl.int64)
        query = tl.load(q + row * q_r + at * q_s + (head * q_h)[:, None] + d[None, :], mask=mask, other=0.0)
        out = row * o_r + line.to(tl.int64) * o_s + (head * o_h)[:, None] + d[None, :]
        tl.store(out_q + out, query, mask=inside)
        lines = (row * heads + head) * padded_slots
        known = tl.load(begun_lse + lines + line, mask=asking, other=0.0)
        summed = tl.zeros([HEADS, D], tl.float32)
        sums = tl.zeros([HEADS], tl.float32)
        block, k = slot // B, slot % B
        going = real
        while going:
            here = block * B + k
            share = tl.exp2(known - tl.load(lse + lines + here, mask=there, other=0.0))
            own = grad + row * g_r + here.to(tl.int64) * g_s + (head * g_h)[:, None] + d[None, :]
            summed += share[:, None] * tl.load(own, mask=inside, other=0.0).to(tl.float32)
            sums += share * tl.load(delta + lines + here, mask=there, other=0.0)
            block += 1
            k -= tl.load(gap + row * (blocks + 1) + block)
            going = k > 0
        tl.store(out_grad + out, summed.to(out_grad.dtype.element_ty), mask=inside)
        tl.store(out_delta + lines + line, sums, mask=there)
