"""Triton: what becomes of a piece, a part of a row's attention that one program has worked out.

Owns the partial results and their joining. Programs take shares of the KV that may begin and end inside of rows (see
`kernels.shares`). A row that one program saw whole is written at once; of others, each program leaves its piece in
memory, and the last one to end joins them all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        cell = ((first_share + piece) * KV_HEADS + kv_head) * 2 + (piece == 0).to(tl.int32)  # see `finish`
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


@triton.jit
def finish(
    acc,  # float32 [BLOCK_M, PADDED_DIM], weighted values of the group's query heads
    total,  # float32 [BLOCK_M], their weights' sums
    top,  # float32 [BLOCK_M], the scores that weights are relative to, base 2
    row,
    kv_head,
    share,
    share_tiles,
    at_tile,  # where the row begins in the line of tiles
    tiles,  # that the row has
    offset,  # the first of them in this piece
    count,  # of them in this piece
    out,  # [rows, heads, head_dim]
    partial,  # float32 [shares, kv_heads, 2, group, head_dim]
    partial_lse,  # float32 [shares, kv_heads, 2, group], base 2
    ended,  # int32 [at least rows * kv_heads], pieces that have ended; all 0 before and after
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes a row that is whole, or else leaves the piece, and joins the row's pieces if it is the last to end."""
    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    head = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    result = acc / total[:, None]
    if count == tiles:
        cells = (row.to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + cells, result.to(out.dtype.element_ty), mask=mask)
    else:
        # A share has two pieces at most: of a row that began in an earlier one, and of one that ends in a later.
        place = ((share * KV_HEADS + kv_head) * 2 + (offset == 0).to(tl.int32)) * GROUP + member
        tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
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
                partial, partial_lse, out, row, kv_head, first_share, pieces, KV_HEADS, GROUP, HEAD_DIM, PADDED_GROUP,
                PADDED_DIM, CHUNK,
            )  # fmt: skip
            tl.store(ended + pair, 0)


def partial_results(
    shares: int, kv_heads: int, group: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where a launch's pieces are left: `partial` and `partial_lse` of `finish`."""
    partial = torch.empty((shares, kv_heads, 2, group, head_dim), device=device)
    return partial, torch.empty((shares, kv_heads, 2, group), device=device)


_made: dict[tuple[torch.device, int], list[Tensor]] = {}


def counters(device: torch.device, pairs: int) -> Tensor:
    """The current stream's counters of ended pieces, int32 [at least pairs], zero whenever no kernel runs.

    Graphs hold their addresses, so none is ever freed, nor may one be born in a graph's own memory: a shape's first
    call is an eager one on the stream that captures it.
    """
    on_cuda = device.type == "cuda"
    made = _made.setdefault((device, torch.cuda.current_stream(device).cuda_stream if on_cuda else 0), [])
    if not made or made[-1].numel() < pairs:
        assert not (on_cuda and torch.cuda.is_current_stream_capturing()), (
            "decode attention was not warmed up on its stream"
        )
        made.append(torch.zeros(max(pairs, _LEAST_COUNTERS), dtype=torch.int32, device=device))
    return made[-1]
