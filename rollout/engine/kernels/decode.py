"""Triton: attention of one query a row over its paged KV.

Owns the decode kernel. A program takes one share of a kv head's KV, as `kernels.shares` has cut it, which may begin and
end inside of rows; the last piece of a row to end joins all of them. The query heads of a kv head go through its keys
and values together. Refuses to run twice at once on one stream's counters, as two streams replaying graphs would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.early import launch_next, wait
from rollout.engine.kernels.kv_write import check_cache
from rollout.engine.kernels.shares import decode_cuts
from rollout.engine.kernels.tiles import block_ids, cells, limited, load_tile, softmax_step, tiles_of, visible

_LEAST_COUNTERS = 1 << 14  # covers 1,024 rows of 16 kv heads


@triton.jit
def _join(
    partial,
    partial_lse,
    out,
    row,
    kv_head,
    first_share,
    pieces,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Attention of a pair of row and kv head from that of its pieces, which other programs have just written."""
    member = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    top = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(0, pieces, CHUNK):
        piece = start + tl.arange(0, CHUNK)
        cell = ((first_share + piece) * KV_HEADS + kv_head) * 2 + (piece == 0).to(tl.int32)  # see `_decode_kernel`
        place = cell[:, None] * GROUP + member[None, :]  # [CHUNK, PADDED_GROUP]
        real = (piece < pieces)[:, None] & (member < GROUP)[None, :]
        # NOTE: .cg goes past the L1 cache, which may hold lines from before the other programs wrote.
        lse = tl.load(partial_lse + place, mask=real, other=float("-inf"), cache_modifier=".cg")
        inside = place[:, :, None] * HEAD_DIM + dim[None, None, :]
        part_mask = (piece < pieces)[:, None, None] & mask[None, :, :]
        part = tl.load(partial + inside, mask=part_mask, other=0.0, cache_modifier=".cg")
        top_next = tl.maximum(top, tl.max(lse, 0))
        decay = tl.exp2(top - top_next)
        weights = tl.exp2(lse - top_next[None, :])
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * part, 0)
        top = top_next
    result = acc / total[:, None]
    at = row.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member
    tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    query,
    k_cache,
    v_cache,
    block_table,
    token_row,
    position,
    cuts,
    out,  # [rows, heads, head_dim]
    partial,  # float32 [shares, kv_heads, 2, group, head_dim]
    partial_lse,  # float32 [shares, kv_heads, 2, group], base 2
    ended,  # int32 [at least rows * kv_heads], pieces that have ended; all 0 before and after
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
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
    PADDED_GROUP: tl.constexpr,
    JOIN_CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        launch_next()
    kv_head = tl.program_id(0) % KV_HEADS  # neighbours share a block table
    share = tl.program_id(0) // KV_HEADS
    cut = cuts + share * 8
    row = tl.load(cut)
    offset = tl.load(cut + 1)
    left = tl.load(cut + 2)
    share_tiles = tl.load(cut + 3)
    at = tl.load(cut + 4)
    sequence = tl.load(cut + 5)
    at_tile = share * share_tiles - offset  # where the row begins in the line

    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, BLOCK_M)  # of the group of query heads
    head = kv_head * GROUP + member
    query_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head_offset = kv_head * cache_head_stride

    if EARLY:
        if left == 0:
            return
        # The first tile is fetched before the wait, but for the newest position, which the kernel before writes.
        table = block_table + sequence.to(tl.int64) * table_stride
        first = tiles_of(at, WINDOW, BLOCK_N)[0] + offset
        k, v = load_tile(
            k_cache, v_cache, table, first, at - 1, at, head_offset, cache_block_stride,
            WINDOW, BLOCK_N, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
        wait()
        if first == at // BLOCK_N:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
            cell = block * cache_block_stride + head_offset + at % BLOCK_SIZE * HEAD_DIM + dim
            newest_k = tl.load(k_cache + cell, mask=dim < HEAD_DIM, other=0.0, cache_modifier=".cg")[None, :]
            newest_v = tl.load(v_cache + cell, mask=dim < HEAD_DIM, other=0.0, cache_modifier=".cg")[None, :]
            is_newest = (first * BLOCK_N + tl.arange(0, BLOCK_N) == at)[:, None]
            k = tl.where(is_newest, newest_k, k)
            v = tl.where(is_newest, newest_v, v)

    while left > 0:
        table = block_table + sequence.to(tl.int64) * table_stride
        low, tiles = tiles_of(at, WINDOW, BLOCK_N)
        count = tl.minimum(tiles - offset, left)
        first = low + offset
        last = first + count

        query_at = query + row.to(tl.int64) * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
        q = tl.load(query_at, mask=query_mask, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        if EARLY:
            # A tile is fetched, into registers, while the one before is worked on.
            for tile in tl.range(first, last, num_stages=1):
                k_next, v_next = load_tile(
                    k_cache, v_cache, table, tile + 1, tl.minimum(at, last * BLOCK_N - 1), at, head_offset,
                    cache_block_stride, WINDOW, BLOCK_N, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
                )  # fmt: skip
                scores = limited(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, softcap, SOFTCAP)
                scores = tl.where(visible(tile, at, at, WINDOW, BLOCK_N)[None, :], scores, float("-inf"))
                weights, decay, top, total = softmax_step(scores, top, total, False)
                acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
                k = k_next
                v = v_next
        else:
            # Tiles are fetched into shared memory, several of them ahead: Triton pipelines this loop's loads. The block
            # ids of a tile are fetched a tile early, so that no address in the loop waits for a load in it.
            block = block_ids(table, first, at + 1, BLOCK_N, BLOCK_SIZE)
            for tile in range(first, last):
                block_next = block_ids(table, tl.minimum(tile + 1, last - 1), at + 1, BLOCK_N, BLOCK_SIZE)
                seen = visible(tile, at, at, WINDOW, BLOCK_N)
                cell_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
                keys = cells(k_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
                k = tl.load(keys, mask=cell_mask, other=0.0)
                scores = limited(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, softcap, SOFTCAP)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                weights, decay, top, total = softmax_step(scores, top, total, False)
                values = cells(
                    v_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM
                )
                v = tl.load(values, mask=cell_mask, other=0.0)
                acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
                block = block_next

        result = acc / total[:, None]
        if count == tiles:
            cells_out = (row.to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + cells_out, result.to(out.dtype.element_ty), mask=query_mask)
        else:
            # A share has two pieces at most: of a row that began in an earlier one, and of one that ends in a later.
            place = ((share * KV_HEADS + kv_head) * 2 + (offset == 0).to(tl.int32)) * GROUP + member
            tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], result, mask=query_mask)
            tl.store(partial_lse + place, top + tl.log2(total), mask=member < GROUP)
            first_share = at_tile // share_tiles
            pieces = (at_tile + tiles - 1) // share_tiles - first_share + 1
            pair = row * KV_HEADS + kv_head
            # One thread counts for the program: barriers make that release the stores, and acquire the loads, of all.
            tl.debug_barrier()
            before = tl.atomic_add(ended + pair, 1, sem="acq_rel")
            tl.debug_barrier()
            if before == pieces - 1:
                _join(
                    partial, partial_lse, out, row, kv_head, first_share, pieces, KV_HEADS, GROUP, HEAD_DIM,
                    PADDED_GROUP, PADDED_DIM, JOIN_CHUNK,
                )  # fmt: skip
                tl.store(ended + pair, 0)
        left -= count
        at_tile += tiles
        offset = 0
        row += 1
        if left > 0:
            at = tl.load(position + row)
            sequence = tl.load(token_row + row)
            if EARLY:
                table = block_table + sequence.to(tl.int64) * table_stride
                low, _ = tiles_of(at, WINDOW, BLOCK_N)
                k, v = load_tile(
                    k_cache, v_cache, table, low, at, at, head_offset, cache_block_stride,
                    WINDOW, BLOCK_N, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
                )  # fmt: skip


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
    cuts: Tensor | None = None,
    early: bool = False,
    tiles: tuning.Tiles | None = None,
) -> Tensor:
    """Attention of one query a row over the row's cache. See `reference.paged_decode`.

    `cuts` is what `decode_cuts` made for these positions, window, tiles and `early`; None: it is made here. `early`:
    the kernel is one of `kernels.early`. `tiles` stand in for the choice of `tuning`, for measurements.
    """
    rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    check_cache(k_cache, v_cache)
    assert query.stride(-1) == 1 and heads % kv_heads == 0
    device = query.device
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=device)
    if rows == 0:
        return out
    group = heads // kv_heads
    tiles = tiles or tuning.decode_tiles(head_dim, query.element_size(), early=early)
    if cuts is None:
        cuts = decode_cuts(token_row, position, k_cache, window=window, early=early, tiles=tiles)
    shares = cuts.shape[0]
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_group = triton.next_power_of_2(group)
    partial = torch.empty((shares, kv_heads, 2, group, head_dim), device=device)
    partial_lse = torch.empty((shares, kv_heads, 2, group), device=device)
    _decode_kernel[(shares * kv_heads,)](
        query,
        k_cache,
        v_cache,
        block_table,
        token_row,
        position,
        cuts,
        out,
        partial,
        partial_lse,
        _counters(device, rows * kv_heads),
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        scaling,
        softcap,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        BLOCK_M=max(16, padded_group),
        BLOCK_N=tiles.block_n,
        PADDED_DIM=padded_dim,
        PADDED_GROUP=padded_group,
        JOIN_CHUNK=tuning.joined_at_once(padded_group * padded_dim, tiles, early=early),
        EARLY=early,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=early and query.is_cuda,
    )
    return out


_made: dict[tuple[torch.device, int], list[Tensor]] = {}


def _counters(device: torch.device, pairs: int) -> Tensor:
    """The current stream's counters of ended pieces, int32 [at least pairs], zero whenever no kernel runs.

    Graphs hold their addresses, so none is ever freed, nor may one be born in a graph's own memory: a shape's first
    call is an eager one on the stream that captures it.
    """
    on_cuda = device.type == "cuda"
    made = _made.setdefault((device, torch.cuda.current_stream(device).cuda_stream if on_cuda else 0), [])
    if not made or made[-1].numel() < pairs:
        assert not (on_cuda and torch.cuda.is_current_stream_capturing()), (
            "paged_decode was not warmed up on its stream"
        )
        made.append(torch.zeros(max(pairs, _LEAST_COUNTERS), dtype=torch.int32, device=device))
    return made[-1]
