"""Triton: causal attention of ragged prompt chunks over their rows' paged KV.

Owns the prefill kernel. The keys and values of the chunk itself are already in the cache, so a first chunk, a later one
and a prompt behind a shared prefix are the same thing. Each program takes a tile of one sequence's queries for one
head; it finds its sequence on the device, so the launch needs to know only how many tokens and sequences there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.kv_write import check_cache
from rollout.engine.kernels.tiles import block_ids, cells, limited, softmax_step


@triton.jit(do_not_specialize=["seqs", "table_stride"])
def _prefill_kernel(
    query,
    k_cache,
    v_cache,
    block_table,
    seq_row,
    query_start,
    position,
    out,  # [tokens, heads, head_dim]
    seqs,
    query_token_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    scaling,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SEQS: tl.constexpr,
):
    nth = tl.program_id(0)  # tile of queries in the batch
    head = tl.program_id(1)
    lane = tl.arange(0, PADDED_SEQS)
    starts = tl.load(query_start + lane, mask=lane < seqs, other=0)
    ends = tl.load(query_start + lane + 1, mask=lane < seqs, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tiles_until = tl.cumsum(tiles, 0)  # inclusive
    if nth < tl.sum(tiles, 0):
        seq = tl.sum((tiles_until <= nth).to(tl.int32), 0)
        tile_of_seq = nth - tl.max(tl.where(tiles_until <= nth, tiles_until, 0), 0)
        token = tl.load(query_start + seq) + tile_of_seq * BLOCK_M + tl.arange(0, BLOCK_M)
        real = token < tl.load(query_start + seq + 1)
        at = tl.load(position + token, mask=real, other=-1)  # [BLOCK_M]
        highest = tl.max(at, 0)
        lowest = tl.min(tl.where(real, at, highest), 0)
        begin = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW > 0 else lowest * 0
        first = begin // BLOCK_N
        last = highest // BLOCK_N + 1
        table = block_table + tl.load(seq_row + seq).to(tl.int64) * table_stride

        head_offset = head // GROUP * cache_head_stride
        dim = tl.arange(0, PADDED_DIM)
        query_mask = real[:, None] & (dim < HEAD_DIM)[None, :]
        query_at = query + token.to(tl.int64)[:, None] * query_token_stride + head * query_head_stride + dim[None, :]
        q = tl.load(query_at, mask=query_mask, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        # The block ids of a tile are fetched a tile early, so that no address in the loop waits for a load in it.
        block = block_ids(table, first, highest + 1, BLOCK_N, BLOCK_SIZE)
        for tile in range(first, last):
            block_next = block_ids(table, tl.minimum(tile + 1, last - 1), highest + 1, BLOCK_N, BLOCK_SIZE)
            where = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            written = (where >= begin) & (where <= highest)
            cell_mask = written[:, None] & (dim < HEAD_DIM)[None, :]

            keys = cells(k_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            k = tl.load(keys, mask=cell_mask, other=0.0)
            scores = limited(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, softcap, SOFTCAP)
            seen = where[None, :] <= at[:, None]
            if WINDOW > 0:
                seen = seen & (where[None, :] > at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            # A query may see nothing of its tile-mates' first tiles.
            weights, decay, top, total = softmax_step(scores, top, total, True)
            values = cells(v_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            v = tl.load(values, mask=cell_mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            block = block_next

        result = acc / tl.where(real, total, 1.0)[:, None]
        cells_out = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + cells_out, result.to(out.dtype.element_ty), mask=query_mask)


def paged_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_row: Tensor,
    query_start: Tensor,
    position: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int,
    tiles: tuning.Tiles | None = None,
) -> Tensor:
    """Causal attention of ragged prompt chunks over their rows' cache. See `reference.paged_prefill`.

    `tiles` stands in for the choice of `tuning`, for measurements.
    """
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    seqs = seq_row.shape[0]
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if tokens == 0:
        return out
    check_cache(k_cache, v_cache)
    assert query.stride(-1) == 1 and heads % kv_heads == 0
    tiles = tiles or tuning.prefill_tiles(head_dim, query.element_size())
    # A sequence's last tile may be a part: at most one a sequence, and none has more than max_query_len.
    most = min(tokens // tiles.block_m + seqs, seqs * triton.cdiv(max_query_len, tiles.block_m))
    _prefill_kernel[(most, heads)](
        query,
        k_cache,
        v_cache,
        block_table,
        seq_row,
        query_start,
        position,
        out,
        seqs,
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        scaling,
        softcap,
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        PADDED_SEQS=max(32 * tiles.warps, triton.next_power_of_2(seqs)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
