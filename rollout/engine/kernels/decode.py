"""Triton: attention of one query a row over its paged KV.

Owns the decode kernel. A program takes one share of a kv head's KV, as `kernels.shares` has cut it, which may begin and
end inside of rows; `kernels.pieces` joins what programs have of a row. The query heads of a kv head go through its keys
and values together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.kv_write import check_cache
from rollout.engine.kernels.pieces import counters, finish, partial_results
from rollout.engine.kernels.shares import decode_cuts, read_cut
from rollout.engine.kernels.tiles import block_ids, cells, limited, softmax_step, tiles_of, visible


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    query,
    k_cache,
    v_cache,
    block_table,
    token_row,
    position,
    cuts,
    out,  # this and the next three as `pieces.finish` has them
    partial,
    partial_lse,
    ended,
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
):
    kv_head = tl.program_id(0) % KV_HEADS  # neighbours share a block table
    share = tl.program_id(0) // KV_HEADS
    row, offset, left, share_tiles, at, sequence = read_cut(cuts, share)
    at_tile = share * share_tiles - offset  # where the row begins in the line

    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, BLOCK_M)  # of the group of query heads
    head = kv_head * GROUP + member
    query_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head_offset = kv_head * cache_head_stride

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
            values = cells(v_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            v = tl.load(values, mask=cell_mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            block = block_next

        finish(
            acc, total, top, row, kv_head, share, share_tiles, at_tile, tiles, offset, count, out, partial,
            partial_lse, ended, KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, PADDED_GROUP, PADDED_DIM, JOIN_CHUNK,
        )  # fmt: skip
        left -= count
        at_tile += tiles
        offset = 0
        row += 1
        if left > 0:
            at = tl.load(position + row)
            sequence = tl.load(token_row + row)


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
    tiles: tuning.Tiles | None = None,
) -> Tensor:
    """Attention of one query a row over the row's cache. See `reference.paged_decode`.

    `cuts` is what `decode_cuts` made for these positions, window and tiles; None: it is made here. `tiles` stand in for
    the choice of `tuning`, for measurements.
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
    tiles = tiles or tuning.decode_tiles(head_dim, query.element_size(), rows)
    if cuts is None:
        cuts = decode_cuts(token_row, position, k_cache, window=window, tiles=tiles)
    shares = cuts.shape[0]
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_group = triton.next_power_of_2(group)
    partial, partial_lse = partial_results(shares, kv_heads, group, head_dim, device)
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
        counters(device, rows * kv_heads),
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
        JOIN_CHUNK=tuning.joined_at_once(padded_group * padded_dim, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
