"""Triton: attention of one query a row over its paged KV.

Owns the decode kernel and its combine kernel. A row's KV is cut into pieces, at places that depend on nothing but the
row's own length and the batch's size, so a row's result does not depend on its neighbours. A fixed number of persistent
programs deal the pieces of all rows among themselves: no program is launched for a piece that does not exist, and a
long row among short ones is shared by many. The query heads of a kv head go through its keys and values together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.kv_write import check_cache


@triton.jit
def _cut(at, splits, split_tiles, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile, tiles, tiles a piece and pieces of a row (or rows) whose last position is `at`."""
    if WINDOW > 0:
        low = tl.maximum(at - (WINDOW - 1), 0) // BLOCK_N
    else:
        low = at * 0
    tiles = at // BLOCK_N + 1 - low
    wanted = tl.minimum((tiles + split_tiles - 1) // split_tiles, splits)
    piece = (tiles + wanted - 1) // wanted
    return low, tiles, piece, (tiles + piece - 1) // piece


@triton.jit
def _block_ids(table, tile, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block (or each position's block, where a tile spans several) of a tile of positions below `end`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + tile * BLOCK_N // BLOCK_SIZE)
    else:
        where = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + where // BLOCK_SIZE, mask=where < end, other=0)


@triton.jit
def _cells(
    cache,
    block,
    tile,
    head_offset,
    dim,
    block_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Pointers [BLOCK_N, padded dim] to a tile of one head. Blocks lie far apart, so their offsets need 64 bits."""
    if BLOCK_SIZE % BLOCK_N == 0:
        base = block.to(tl.int64) * block_stride + head_offset + (tile * BLOCK_N) % BLOCK_SIZE * DIM
        return cache + base + (tl.arange(0, BLOCK_N)[:, None] * DIM + dim[None, :])
    else:
        inside = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
        return cache + (block.to(tl.int64) * block_stride + head_offset + inside * DIM)[:, None] + dim[None, :]


@triton.jit
def _soft_limit(x, limit):
    """limit * tanh(x / limit), from exp2 alone: it saturates to +-limit without overflowing to NaN."""
    return limit - 2.0 * limit / (tl.exp2(x * (2.0 * 1.4426950408889634 / limit)) + 1.0)


@triton.jit(do_not_specialize=["rows", "table_stride", "splits", "split_tiles"])
def _decode_kernel(
    query,
    k_cache,
    v_cache,
    block_table,
    token_row,
    position,
    out,  # [rows, heads, head_dim]
    partial,  # float32 [rows, heads, splits, head_dim]
    partial_lse,  # float32 [rows, heads, splits], base 2
    rows,
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    splits,
    split_tiles,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
):
    lane = tl.arange(0, PADDED_ROWS)
    every = tl.load(position + lane, mask=lane < rows, other=0)
    _, _, _, pieces = _cut(every, splits, split_tiles, WINDOW, BLOCK_N)
    pieces = tl.where(lane < rows, pieces, 0)
    pieces_until = tl.cumsum(pieces, 0)  # inclusive
    items = tl.sum(pieces, 0) * KV_HEADS

    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, BLOCK_M)  # of the group of query heads
    query_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]

    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        nth = item // KV_HEADS  # piece of the batch; neighbours in time are the kv heads of one piece
        kv_head = item % KV_HEADS
        row = tl.sum((pieces_until <= nth).to(tl.int32), 0)
        split = nth - tl.max(tl.where(pieces_until <= nth, pieces_until, 0), 0)
        at = tl.load(position + row)
        table = block_table + tl.load(token_row + row).to(tl.int64) * table_stride
        low, tiles, piece, row_pieces = _cut(at, splits, split_tiles, WINDOW, BLOCK_N)
        first = low + split * piece
        last = tl.minimum(first + piece, low + tiles)

        head = kv_head * GROUP + member
        head_offset = kv_head * cache_head_stride
        query_at = query + row.to(tl.int64) * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
        q = tl.load(query_at, mask=query_mask, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        # The block ids of a tile are fetched a tile early, so that no address in the loop waits for a load in it.
        block = _block_ids(table, first, at + 1, BLOCK_N, BLOCK_SIZE)
        for tile in range(first, last):
            block_next = _block_ids(table, tl.minimum(tile + 1, last - 1), at + 1, BLOCK_N, BLOCK_SIZE)
            where = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = where <= at
            if WINDOW > 0:
                seen = seen & (where > at - WINDOW)
            cell_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]

            keys = _cells(k_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            k = tl.load(keys, mask=cell_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if SOFTCAP:
                scores = _soft_limit(scores * scaling, softcap) * 1.4426950408889634
            else:
                scores = scores * (scaling * 1.4426950408889634)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            top_next = tl.maximum(top, tl.max(scores, 1))
            decay = tl.exp2(top - top_next)
            weights = tl.exp2(scores - top_next[:, None])
            total = total * decay + tl.sum(weights, 1)
            values = _cells(v_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            v = tl.load(values, mask=cell_mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            top = top_next
            block = block_next

        result = acc / total[:, None]
        place_out = row.to(tl.int64) * (KV_HEADS * GROUP) + head  # [BLOCK_M]
        if row_pieces == 1:
            cells_out = place_out[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + cells_out, result.to(out.dtype.element_ty), mask=query_mask)
        else:
            place_part = place_out * splits + split
            tl.store(partial + place_part[:, None] * HEAD_DIM + dim[None, :], result, mask=query_mask)
            tl.store(partial_lse + place_part, top + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["splits", "split_tiles"])
def _combine_kernel(
    partial,
    partial_lse,
    position,
    out,
    splits,
    split_tiles,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,  # heads a program
):
    row = tl.program_id(0)
    _, _, _, pieces = _cut(tl.load(position + row), splits, split_tiles, WINDOW, BLOCK_N)
    if pieces > 1:
        dim = tl.arange(0, PADDED_DIM)
        for nth in range(EACH):
            place = row.to(tl.int64) * HEADS + tl.program_id(1) * EACH + nth
            top = tl.max(tl.full([CHUNK], float("-inf"), tl.float32), 0)
            total = tl.sum(tl.zeros([CHUNK], tl.float32), 0)
            acc = tl.zeros([PADDED_DIM], tl.float32)
            for start in range(0, pieces, CHUNK):
                split = start + tl.arange(0, CHUNK)
                lse = tl.load(partial_lse + place * splits + split, mask=split < pieces, other=float("-inf"))
                cells = (place * splits + split)[:, None] * HEAD_DIM + dim[None, :]
                mask = (split < pieces)[:, None] & (dim < HEAD_DIM)[None, :]
                part = tl.load(partial + cells, mask=mask, other=0.0)
                top_next = tl.maximum(top, tl.max(lse, 0))
                decay = tl.exp2(top - top_next)
                weights = tl.exp2(lse - top_next)
                total = total * decay + tl.sum(weights, 0)
                acc = acc * decay + tl.sum(weights[:, None] * part, 0)
                top = top_next
            tl.store(out + place * HEAD_DIM + dim, (acc / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    token_row: Tensor,
    position: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    tiles: tuning.Tiles | None = None,
    splits: int | None = None,
    split_tokens: int | None = None,
) -> Tensor:
    """Attention of one query a row over the row's cache. See `reference.paged_decode`.

    `tiles`, `splits` (the most pieces a row may be cut into) and `split_tokens` (KV positions below which a piece is
    not cut) stand in for the choices of `tuning`, for measurements.
    """
    rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    check_cache(k_cache, v_cache)
    assert query.stride(-1) == 1 and heads % kv_heads == 0
    sms = tuning.sm_count(query.device)
    tiles = tiles or tuning.decode_tiles(head_dim, query.element_size())
    splits = splits or tuning.num_splits(rows, kv_heads, sms)
    split_tiles = max(1, (split_tokens or tuning.split_tokens(rows, kv_heads, sms)) // tiles.block_n)
    group = heads // kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((rows, heads, splits, head_dim) if splits > 1 else (1,), device=query.device)
    partial_lse = torch.empty((rows, heads, splits) if splits > 1 else (1,), device=query.device)
    _decode_kernel[(min(sms * tiles.programs_per_sm, rows * kv_heads * splits),)](
        query,
        k_cache,
        v_cache,
        block_table,
        token_row,
        position,
        out,
        partial,
        partial_lse,
        rows,
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        splits,
        split_tiles,
        scaling,
        softcap,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=tiles.block_n,
        PADDED_DIM=padded_dim,
        PADDED_ROWS=max(32 * tiles.warps, triton.next_power_of_2(rows)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        # Most rows of a large batch have one piece and nothing to join, so fewer programs find that out.
        each = group if rows * heads > 32 * sms else 1
        _combine_kernel[(rows, heads // each)](
            partial,
            partial_lse,
            position,
            out,
            splits,
            split_tiles,
            HEADS=heads,
            HEAD_DIM=head_dim,
            WINDOW=window,
            BLOCK_N=tiles.block_n,
            PADDED_DIM=padded_dim,
            CHUNK=8,
            EACH=each,
            num_warps=2 if padded_dim <= 128 else 4,
        )
    return out
