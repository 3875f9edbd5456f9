"""Triton: what the attention kernels do with a tile of a row's paged KV. Owns addresses, scores and running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.engine.kernels.constants import LOG2_E


@triton.jit
def tiles_of(at, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile and number of tiles that a row (or rows) sees whose last position is `at`."""
    if WINDOW > 0:
        low = tl.maximum(at - (WINDOW - 1), 0) // BLOCK_N
    else:
        low = at * 0
    return low, at // BLOCK_N + 1 - low


@triton.jit
def block_ids(table, tile, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block (or each position's block, where a tile spans several) of a tile of positions below `end`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + tile * BLOCK_N // BLOCK_SIZE)
    else:
        where = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + where // BLOCK_SIZE, mask=where < end, other=0)


@triton.jit
def cells(
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
def visible(tile, newest, at, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which positions of a tile, none after `newest`, a row sees whose last position is `at`."""
    where = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = where <= newest
    if WINDOW > 0:
        seen = seen & (where > at - WINDOW)
    return seen


@triton.jit
def load_tile(
    k_cache,
    v_cache,
    table,
    tile,
    newest,
    at,
    head_offset,
    block_stride,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Keys and values [BLOCK_N, PADDED_DIM] of a tile up to the position `newest`, 0 beyond; the row's last is `at`."""
    dim = tl.arange(0, PADDED_DIM)
    mask = visible(tile, newest, at, WINDOW, BLOCK_N)[:, None] & (dim < HEAD_DIM)[None, :]
    block = block_ids(table, tl.minimum(tile, at // BLOCK_N), at + 1, BLOCK_N, BLOCK_SIZE)
    keys = cells(k_cache, block, tile, head_offset, dim, block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
    values = cells(v_cache, block, tile, head_offset, dim, block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
    return tl.load(keys, mask=mask, other=0.0), tl.load(values, mask=mask, other=0.0)


@triton.jit
def limited(scores, scaling, softcap, SOFTCAP: tl.constexpr):
    """Scores scaled, softly bounded where asked for, and over log(2)."""
    if SOFTCAP:
        return _soft_limit(scores * scaling, softcap) * LOG2_E
    else:
        return scores * (scaling * LOG2_E)


@triton.jit
def _soft_limit(x, limit):
    """limit * tanh(x / limit), from exp2 alone: it saturates to +-limit without overflowing to NaN."""
    return limit - 2.0 * limit / (tl.exp2(x * (2.0 * LOG2_E / limit)) + 1.0)


@triton.jit
def softmax_step(scores, top, total, MAY_SEE_NOTHING: tl.constexpr):
    """A running softmax, one tile on.

    Args:
        scores: [queries, BLOCK_N], base 2, -inf where not seen.
        top: [queries], the highest score so far.
        total: [queries], the sum so far of the weights, relative to `top`.
        MAY_SEE_NOTHING: whether a query may have seen nothing yet: -inf less -inf would be NaN.

    Returns:
        The tile's weights [queries, BLOCK_N], what weights so far decay by, and the new `top` and `total`.
    """
    top_next = tl.maximum(top, tl.max(scores, 1))
    if MAY_SEE_NOTHING:
        base = tl.where(top_next == float("-inf"), 0.0, top_next)
    else:
        base = top_next
    decay = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    return weights, decay, top_next, total * decay + tl.sum(weights, 1)
