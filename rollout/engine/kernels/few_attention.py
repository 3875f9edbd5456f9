"""Triton: attention of a decode step of few rows, as a kernel of `kernels.early`.

What `kernels.decode` does, but a program's first tile of KV is on its way before the kernel before has ended, and tiles
are held in registers: with few rows it is the way from kernel to kernel that takes time, with many the KV. The pieces
of one row may be left to the kernel after, `kernels.few_output`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.early import launch_next, wait
from rollout.engine.kernels.few_output import Pieces, leave
from rollout.engine.kernels.kv_write import check_cache
from rollout.engine.kernels.pieces import counters, finish, partial_results
from rollout.engine.kernels.shares import decode_cuts, read_cut
from rollout.engine.kernels.tiles import limited, load_tile, softmax_step, tiles_of, visible


@triton.jit(do_not_specialize=["table_stride"])
def _few_attention_kernel(
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
    lse_stride,
    ended,
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    JOIN_CHUNK: tl.constexpr,
    LEAVE: tl.constexpr,  # the only row's pieces, as `few_output.Pieces` has them: neither `out` nor `ended` is used
):
    launch_next()
    kv_head = tl.program_id(0) % KV_HEADS  # neighbours share a block table
    share = tl.program_id(0) // KV_HEADS
    row, offset, left, share_tiles, at, sequence = read_cut(cuts, share)
    if left == 0:
        return
    at_tile = share * share_tiles - offset  # where the row begins in the line

    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, BLOCK_M)  # of the group of query heads
    head = kv_head * GROUP + member
    query_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head_offset = kv_head * cache_head_stride

    # The first tile is fetched before the wait, but for the newest position, which the kernel before writes.
    table = block_table + sequence.to(tl.int64) * table_stride
    low, tiles = tiles_of(at, WINDOW, BLOCK_N)
    first = low + offset
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
        count = tl.minimum(tiles - offset, left)
        last = first + count
        query_at = query + row.to(tl.int64) * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
        q = tl.load(query_at, mask=query_mask, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        # A tile is fetched, into registers, while the one before is worked on.
        for tile in tl.range(first, last, num_stages=1):
            k_next, v_next = load_tile(
                k_cache, v_cache, table, tile + 1, tl.minimum(at, last * BLOCK_N - 1), at, head_offset,
                cache_block_stride, WINDOW, BLOCK_N, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip
            scores = limited(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, 0.0, False)
            scores = tl.where(visible(tile, at, at, WINDOW, BLOCK_N)[None, :], scores, float("-inf"))
            weights, decay, top, total = softmax_step(scores, top, total, False)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            k = k_next
            v = v_next
        if LEAVE:
            leave(
                acc / total[:, None], top + tl.log2(total), share, head, member < GROUP, partial, partial_lse,
                lse_stride, KV_HEADS * GROUP, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip
        else:
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
            table = block_table + sequence.to(tl.int64) * table_stride
            first, tiles = tiles_of(at, WINDOW, BLOCK_N)
            k, v = load_tile(
                k_cache, v_cache, table, first, at, at, head_offset, cache_block_stride,
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
    cuts: Tensor | None = None,
    tiles: tuning.Tiles | None = None,
    pieces: Pieces | None = None,
) -> Tensor:
    """Attention of one query a row over the row's cache. See `reference.paged_decode`.

    `cuts` is what `decode_cuts` made for these positions and window with `few`; None: it is made here. `tiles` stand
    in for the choice of `tuning`, for measurements. `pieces`: one row's are left there, and what is returned is unset.
    """
    rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    check_cache(k_cache, v_cache)
    assert query.stride(-1) == 1 and heads % kv_heads == 0
    assert pieces is None or rows == 1
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    group = heads // kv_heads
    tiles = tiles or tuning.decode_tiles(head_dim, query.element_size(), rows, few=True)
    if cuts is None:
        cuts = decode_cuts(token_row, position, k_cache, window=window, few=True, tiles=tiles)
    shares = cuts.shape[0]
    padded_dim, padded_group = max(16, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    if pieces is None:
        partial, partial_lse = partial_results(shares, kv_heads, group, head_dim, query.device)
    else:
        partial, partial_lse = pieces.values, pieces.lse
    _few_attention_kernel[(shares * kv_heads,)](
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
        partial_lse.stride(0),
        counters(query.device, rows * kv_heads),
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        scaling,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        BLOCK_M=max(16, padded_group),
        BLOCK_N=tiles.block_n,
        PADDED_DIM=padded_dim,
        PADDED_GROUP=padded_group,
        JOIN_CHUNK=tuning.joined_at_once(padded_group * padded_dim, tiles, few=True),
        LEAVE=pieces is not None,
        num_warps=tiles.warps,
        launch_pdl=query.is_cuda,
    )
    return out
