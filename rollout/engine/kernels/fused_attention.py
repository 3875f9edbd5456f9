"""Triton: all that stands between two products of a decode step's layer, from q, k and v to what heads attended.

Owns in one kernel what elsewhere are two: `pointwise.rope_write` (biases, q/k-norm, rotary position, KV write) and
`kernels.decode`, whose description holds here, too. Every program of a row works out the row's queries for itself. A
row's newest position isn't read from the cache, where a program of this very kernel writes it: a row's last piece adds
it as a tile of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.early import launch_next, wait
from rollout.engine.kernels.kv_write import check_cache
from rollout.engine.kernels.pieces import counters, finish, partial_results
from rollout.engine.kernels.shares import decode_cuts, read_cut
from rollout.engine.kernels.tiles import block_ids, cells, limited, softmax_step, tiles_of, visible


@triton.jit
def _halves(source, place, mask, HALF: tl.constexpr):
    """Both halves of heads, [heads, HALF] each."""
    place += tl.arange(0, HALF)[None, :]
    return tl.load(source + place, mask=mask, other=0.0), tl.load(source + place + HALF, mask=mask, other=0.0)


@triton.jit
def _row_weights(
    q_bias, k_bias, v_bias, q_norm, k_norm, cos_sin, at, kv_head, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr,
    HALF: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """What a row's heads are worked out with, beside the product: biases, norms, cosines and sines."""
    member = tl.arange(0, PADDED_GROUP)[:, None]
    grouped = member < GROUP
    nothing = tl.zeros([1, 1], tl.int32)
    qb, qb_high, kb, kb_high, vb = nothing, nothing, nothing, nothing, nothing
    qn, qn_high, kn, kn_high, cos, sin = nothing, nothing, nothing, nothing, nothing, nothing
    if BIAS:
        qb, qb_high = _halves(q_bias, (kv_head * GROUP + member) * (2 * HALF), grouped, HALF)
        kb, kb_high = _halves(k_bias, kv_head * (2 * HALF) + member * 0, grouped, HALF)
        vb = tl.load(v_bias + kv_head * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :])
    if NORM:
        qn, qn_high = _halves(q_norm, member * 0, grouped, HALF)
        kn, kn_high = _halves(k_norm, member * 0, grouped, HALF)
    if ROPE:
        cos, sin = _halves(cos_sin, at.to(tl.int64) * (2 * HALF) + member * 0, grouped, HALF)
    return qb, qb_high, kb, kb_high, vb, qn, qn_high, kn, kn_high, cos, sin


@triton.jit
def _biased(x, bias, BIAS: tl.constexpr):
    """With bias, rounded as the module rounds."""
    if BIAS:
        x = (x.to(tl.float32) + bias.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _turned(low, high, scale_low, scale_high, cos, sin, eps, NORM: tl.constexpr, ROPE: tl.constexpr):
    """Halves of heads with norm and rotary position, rounded as the module rounds."""
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * low.shape[1]) + eps)[:, None]
        low = (scale_low.to(tl.float32) * (low * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        high = (scale_high.to(tl.float32) * (high * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if ROPE:
        turned = low * cos.to(tl.float32) - high * sin.to(tl.float32)
        high = high * cos.to(tl.float32) + low * sin.to(tl.float32)
        low = turned
    return low.to(dtype), high.to(dtype)


@triton.jit
def _whole(low, high):
    """Halves of heads behind one another, [heads, 2 * HALF]."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (low.shape[0], 2 * low.shape[1]))


@triton.jit
def _operand(x, BLOCK_M: tl.constexpr):
    """[PADDED_GROUP, n], over and over, as the rows that a product needs: [BLOCK_M, n]."""
    REPEATS: tl.constexpr = BLOCK_M // x.shape[0]
    return tl.reshape(tl.broadcast_to(x[None, :, :], (REPEATS, x.shape[0], x.shape[1])), (BLOCK_M, x.shape[1]))


@triton.jit(do_not_specialize=["table_stride"])
def _fused_attention_kernel(
    q,  # [rows, heads * HEAD_DIM]
    k,  # [rows, KV_HEADS * HEAD_DIM]
    v,
    q_bias,
    k_bias,
    v_bias,
    q_norm,
    k_norm,
    eps,
    cos_sin,  # [positions, 2, HEAD_DIM / 2]
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
    q_stride,
    k_stride,
    v_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    JOIN_CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        launch_next()
    kv_head = tl.program_id(0) % KV_HEADS  # neighbours share a block table
    share = tl.program_id(0) // KV_HEADS
    row, offset, left, share_tiles, at, sequence = read_cut(cuts, share)
    row = row.to(tl.int64)
    if left == 0:
        return
    at_tile = share * share_tiles - offset  # where the row begins in the line

    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = k_cache.dtype.element_ty
    half = tl.arange(0, HALF)
    dim = tl.arange(0, HEAD_DIM)
    member = tl.arange(0, PADDED_GROUP)[:, None]  # of the group of query heads
    heads = (kv_head * GROUP + member) * HEAD_DIM
    grouped = member < GROUP
    head = kv_head * HEAD_DIM + member * 0  # the key stands beside each query, in the same threads
    head_offset = kv_head * cache_head_stride

    while left > 0:
        table = block_table + sequence.to(tl.int64) * table_stride
        low, tiles = tiles_of(at, WINDOW, BLOCK_N)
        count = tl.minimum(tiles - offset, left)
        first = low + offset
        last = first + count

        # All that is needed before the first tile is fetched before anything is made of it.
        block = block_ids(table, first, at + 1, BLOCK_N, BLOCK_SIZE)
        newest_block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        qb, qb_high, kb, kb_high, vb, qn, qn_high, kn, kn_high, cos, sin = _row_weights(
            q_bias, k_bias, v_bias, q_norm, k_norm, cos_sin, at, kv_head, GROUP, PADDED_GROUP, HALF, BIAS, NORM, ROPE
        )
        if EARLY:
            wait()
        q_low, q_high = _halves(q, row * q_stride + heads, grouped, HALF)
        key_low, key_high = _halves(k, row * k_stride + head, grouped, HALF)
        value = tl.load(v + row * v_stride + kv_head * HEAD_DIM + dim[None, :])
        q_low, q_high = _biased(q_low, qb, BIAS), _biased(q_high, qb_high, BIAS)
        key_low, key_high = _biased(key_low, kb, BIAS), _biased(key_high, kb_high, BIAS)
        value = _biased(value, vb, BIAS)
        q_low, q_high = _turned(q_low, q_high, qn, qn_high, cos, sin, eps, NORM, ROPE)
        key_low, key_high = _turned(key_low, key_high, kn, kn_high, cos, sin, eps, NORM, ROPE)
        if offset + count == tiles:  # the row's last piece
            cell = newest_block * cache_block_stride + head_offset + at % BLOCK_SIZE * HEAD_DIM
            tl.store(k_cache + cell + (member * 0 + half[None, :]), key_low, mask=member == 0)
            tl.store(k_cache + cell + (member * 0 + half[None, :]) + HALF, key_high, mask=member == 0)
            tl.store(v_cache + cell + dim[None, :], value)
        products = q_low.to(tl.float32) * key_low.to(tl.float32) + q_high.to(tl.float32) * key_high.to(tl.float32)
        newest = _operand(limited(tl.sum(products, 1), scaling, 0.0, False)[:, None], BLOCK_M)
        query = _operand(_whole(q_low, q_high), BLOCK_M)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        end = tl.minimum(last, tl.cdiv(at, BLOCK_N))  # of the tiles with an older position
        # Tiles are fetched into shared memory, several of them ahead: Triton pipelines this loop's loads. The block
        # ids of a tile are fetched a tile early, so that no address in the loop waits for a load in it.
        for tile in range(first, end):
            block_next = block_ids(table, tl.minimum(tile + 1, last - 1), at + 1, BLOCK_N, BLOCK_SIZE)
            seen = visible(tile, at - 1, at, WINDOW, BLOCK_N)
            keys = cells(k_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            k_tile = tl.load(keys, mask=seen[:, None], other=0.0)
            scores = limited(tl.dot(query, tl.trans(k_tile), input_precision="ieee"), scaling, 0.0, False)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            weights, decay, top, total = softmax_step(scores, top, total, WINDOW == 1)
            values = cells(v_cache, block, tile, head_offset, dim, cache_block_stride, BLOCK_N, BLOCK_SIZE, HEAD_DIM)
            v_tile = tl.load(values, mask=seen[:, None], other=0.0)
            acc = tl.dot(weights.to(dtype), v_tile, acc * decay[:, None], input_precision="ieee")
            block = block_next
        if offset + count == tiles:
            weights, decay, top, total = softmax_step(newest, top, total, False)
            acc = acc * decay[:, None] + weights * value.to(tl.float32)
        finish(
            acc, total, top, row, kv_head, share, share_tiles, at_tile, tiles, offset, count, out, partial,
            partial_lse, ended, KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, PADDED_GROUP, HEAD_DIM, JOIN_CHUNK,
        )  # fmt: skip
        left -= count
        at_tile += tiles
        offset = 0
        row += 1
        if left > 0:
            at = tl.load(position + row)
            sequence = tl.load(token_row + row)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: tuple[Tensor, Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_sin: Tensor | None,
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
    early: bool = False,
) -> Tensor:
    """`reference_layers.rope_write`, and then `reference.paged_decode` of what it returns: [rows, heads, head dim].

    `early`: the kernel is one of `kernels.early`, but for its launch where that doesn't pay, see `tuning.early_stages`.
    `cuts` is what `decode_cuts` made for these positions and window; None: it is made here. `tiles` stand in for the
    choice of `tuning`, for measurements.
    """
    rows, width = q.shape
    _, kv_heads, block_size, head_dim = k_cache.shape
    check_cache(k_cache, v_cache)
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1
    assert head_dim == triton.next_power_of_2(head_dim) >= 32, "halves of heads are operands of products"
    assert cos_sin is None or cos_sin.is_contiguous()
    group = width // head_dim // kv_heads
    device = q.device
    out = torch.empty((rows, width // head_dim, head_dim), dtype=q.dtype, device=device)
    if rows == 0:
        return out
    tiles = tiles or tuning.decode_tiles(head_dim, q.element_size(), rows)
    if cuts is None:
        cuts = decode_cuts(token_row, position, k_cache, window=window, tiles=tiles)
    shares = cuts.shape[0]
    padded_group = triton.next_power_of_2(group)
    stages: int | None = tiles.stages
    if early:
        per_sm = triton.cdiv(shares * kv_heads, tuning.sm_count(device))
        stages = tuning.early_stages(tiles, 2 * head_dim * q.element_size(), per_sm, tuning.shared_bytes(device))
    partial, partial_lse = partial_results(shares, kv_heads, group, head_dim, device)
    q_bias, k_bias, v_bias = biases or (out, out, out)
    q_norm, k_norm = norms or (out, out)
    _fused_attention_kernel[(shares * kv_heads,)](
        q,
        k,
        v,
        q_bias,
        k_bias,
        v_bias,
        q_norm,
        k_norm,
        eps,
        out if cos_sin is None else cos_sin,
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
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        scaling,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        BIAS=biases is not None,
        NORM=norms is not None,
        ROPE=cos_sin is not None,
        BLOCK_M=max(16, padded_group),
        BLOCK_N=tiles.block_n,
        PADDED_GROUP=padded_group,
        JOIN_CHUNK=tuning.joined_at_once(padded_group * head_dim, tiles),
        EARLY=early,
        num_warps=tiles.warps,
        num_stages=stages or tiles.stages,
        launch_pdl=early and stages is not None and q.is_cuda,
    )
    return out
