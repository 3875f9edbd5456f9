"""Triton: how decode attention's work is shared among programs, planned once a step for all layers.

Owns the cuts. Of each kv head, the rows' KV lies in one line of tiles, cut into shares of equal length, one for each
program: so all programs end together, whether rows are alike or one of them is as long as all others. But where a share
ends one row and begins another, its program has twice the way from a query to a piece, and pieces take time to join. So
where that makes no share much longer, rows that are alike are shared out whole, or else each row is cut into shares of
its own. Lengths are read on the device, so a graph plans anew at each replay.

Where a row is cut depends on its neighbours' lengths, and so does the rounding of its float32 sums; nothing else does.
Equal shares are the idea of stream-K (Osama et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.tiles import tiles_of

_BLOCK = 16  # shares whose beginning a program looks for


@triton.jit(do_not_specialize=["rows", "shares", "least_tiles"])
def _cuts_kernel(
    token_row,  # int32 [rows]
    position,  # int32 [rows]
    cuts,  # int32 [shares, 8], see `decode_cuts`
    rows,
    shares,
    least_tiles,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, PADDED_ROWS)
    real = lane < rows
    at = tl.load(position + lane, mask=real, other=0)
    sequence = tl.load(token_row + lane, mask=real, other=0)
    _, tiles = tiles_of(at, WINDOW, BLOCK_N)
    tiles = tl.where(real, tiles, 0)
    until = tl.cumsum(tiles, 0)  # [PADDED_ROWS], inclusive
    total = tl.sum(tiles, 0)
    share_tiles = tl.maximum((total + shares - 1) // shares, least_tiles)
    # Rows stay whole if that leaves no program with an eighth more than its due, and one in ten programs without a row
    # at most.
    share_rows = (rows + shares - 1) // shares
    whole = (tl.max(tiles, 0) * rows * 8 <= total * 9) & (rows * 10 >= share_rows * shares * 9)
    if PADDED_ROWS <= 128:  # of more rows, hardly any has several shares
        # Or else each row has its own if there are enough, at the least of sixteen lengths up to a 24th more. On an
        # H200, a 15th more cost a step of 8 rows of 2K to 16K more than it gained.
        longer = share_tiles + share_tiles * tl.arange(0, 16) // 360  # [16]
        wanted = tl.sum((tiles[None, :] + longer[:, None] - 1) // longer[:, None], 1)
        own_tiles = tl.min(tl.where(wanted <= shares, longer, 1 << 30), 0)
        own = own_tiles < 1 << 30
        share_tiles = tl.where(own, own_tiles, share_tiles)
        until = tl.where(own, tl.cumsum((tiles + share_tiles - 1) // share_tiles * share_tiles, 0), until)

    share = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = share * share_tiles  # [BLOCK], in the line
    first = share * share_rows  # the row, where rows stay whole
    before = tl.where(whole, lane[None, :] < first[:, None], until[None, :] <= begin[:, None]) & real[None, :]
    row = tl.sum(before.to(tl.int32), 1)  # `rows` where the line has ended
    start = tl.max(tl.where(before, until[None, :], 0), 1)  # of the row, in the line
    begin = tl.where(whole, start, begin)
    inside = (lane[None, :] < first[:, None] + share_rows) & real[None, :]
    end = tl.where(whole, tl.max(tl.where(inside, until[None, :], 0), 1), begin + share_tiles)
    chosen = lane[None, :] == row[:, None]
    row_tiles = tl.sum(tl.where(chosen, tiles[None, :], 0), 1)  # [BLOCK]
    if PADDED_ROWS <= 128:
        total = tl.where(own, start + row_tiles, total)  # [BLOCK], the row's end
    count = tl.maximum(tl.minimum(end, total) - begin, 0)
    cut = cuts + share * 8
    used = share < shares
    tl.store(cut, row, mask=used)
    tl.store(cut + 1, begin - start, mask=used)
    tl.store(cut + 2, count, mask=used)
    tl.store(cut + 3, share_tiles, mask=used)
    tl.store(cut + 4, tl.sum(tl.where(chosen, at[None, :], 0), 1), mask=used)
    tl.store(cut + 5, tl.sum(tl.where(chosen, sequence[None, :], 0), 1), mask=used)
    tl.store(cut + 6, (row_tiles + share_tiles - 1) // share_tiles, mask=used)


@triton.jit
def read_cut(cuts, share):
    """A share's row, first tile of it and tiles, those of any share, and the row's position and place in the table.

    The last two stand here as well lest a program waits for one load after another.
    """
    cut = cuts + share * 8
    row = tl.load(cut)
    offset = tl.load(cut + 1)
    left = tl.load(cut + 2)
    share_tiles = tl.load(cut + 3)
    at = tl.load(cut + 4)
    sequence = tl.load(cut + 5)
    return row, offset, left, share_tiles, at, sequence


def decode_cuts(
    token_row: Tensor,
    position: Tensor,
    k_cache: Tensor,
    *,
    window: int = 0,
    few: bool = False,
    tiles: tuning.Tiles | None = None,
    programs: int | None = None,
    least_tokens: int | None = None,
) -> Tensor:
    """Where the shares of a step's KV begin: for every layer that has this window.

    Args:
        token_row: int32 [rows], each row's place in the block table.
        position: int32 [rows], each row's last position.
        k_cache: [blocks, kv heads, block size, head dim], of any layer.
        window: how many positions back a row sees, itself included; 0: all.
        few: whether attention is that of `kernels.few_attention`.
        tiles: stands in for the choice of `tuning`, for measurements; so do `programs`, which run at once, and
            `least_tokens`, positions below which a share isn't cut.

    Returns:
        int32 [shares, 8], of each share: the row in which it begins, the tile of it, its own tiles, those of any share
        where rows are cut, the row's position and place in the block table, and the shares of such a row if it begins
        where a share does; the last means nothing.
    """
    rows, device = position.shape[0], position.device
    _, kv_heads, _, head_dim = k_cache.shape
    tiles = tiles or tuning.decode_tiles(head_dim, k_cache.element_size(), rows, few=few)
    programs = programs or tuning.decode_programs(rows * kv_heads, tiles, tuning.sm_count(device), few=few)
    shares = max(1, programs // kv_heads)
    cuts = torch.empty((shares, 8), dtype=torch.int32, device=device)
    _cuts_kernel[(triton.cdiv(shares, _BLOCK),)](
        token_row,
        position,
        cuts,
        rows,
        shares,
        max(1, (least_tokens or tuning.LEAST_SHARE_TOKENS) // tiles.block_n),
        WINDOW=window,
        BLOCK_N=tiles.block_n,
        PADDED_ROWS=max(128, triton.next_power_of_2(rows)),  # few kernels to compile
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return cuts
