"""Triton: what stands between the fused decoder's matrix products, each step's bytes read and written once.

`rope_write` (biases, q/k-norm, rotary position, KV write) and `silu_mul`. Both read [tokens, features] with any token
stride, for q, k and v (gate, up) are columns of one product, compute in float32, and round where the Hugging Face
module rounds. Norms over the residual stream are in `kernels.rms_norm`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels.early import launch_next, wait


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in float32, rounded to `dtype` where the Hugging Face module rounds, but for the result."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    gate,  # [tokens, FEATURES]
    up,
    out,
    token_stride,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = feature < FEATURES
    at = token * token_stride + feature
    g = tl.load(gate + at, mask=mask, other=0.0)
    u = tl.load(up + at, mask=mask, other=0.0)
    dtype = out.dtype.element_ty
    tl.store(out + token * FEATURES + feature, silu_times(g, u, dtype).to(dtype), mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [tokens, features]. See `reference_layers.silu_mul`."""
    tokens, features = gate.shape
    assert gate.stride() == up.stride() and gate.stride(1) == 1
    out = torch.empty((tokens, features), dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(features))
    _silu_mul_kernel[(triton.cdiv(features, block), tokens)](
        gate, up, out, gate.stride(0), FEATURES=features, BLOCK=block, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _rope_write_kernel(
    q,  # [tokens, HEADS * HEAD_DIM]
    k,  # [tokens, KV_HEADS * HEAD_DIM]
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
    out,  # [tokens, HEADS, HEAD_DIM]
    q_stride,
    k_stride,
    v_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,  # heads a program; divides HEADS and KV_HEADS
    EARLY: tl.constexpr,
):
    if EARLY:
        launch_next()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE  # queries, then keys, then values
    dtype = out.dtype.element_ty
    lane = tl.arange(0, HALF)
    lane_mask = lane < HEAD_DIM // 2
    at = tl.load(position + token)
    if head < HEADS:
        source, bias, norm, nth = q, q_bias, q_norm, head
        token_stride = q_stride
    elif head < HEADS + KV_HEADS:
        source, bias, norm, nth = k, k_bias, k_norm, head - HEADS
        token_stride = k_stride
    else:
        source, bias, norm, nth = v, v_bias, k_norm, head - HEADS - KV_HEADS
        token_stride = v_stride
    heads = nth + tl.arange(0, TILE)
    low = heads[:, None] * HEAD_DIM + lane[None, :]  # [TILE, HALF]
    high = low + HEAD_DIM // 2
    mask = lane_mask[None, :]
    table = cos_sin + at.to(tl.int64) * HEAD_DIM + lane
    row = tl.load(token_row + token).to(tl.int64)
    block = tl.load(block_table + row * table_stride + at // BLOCK_SIZE).to(tl.int64)
    if NORM:
        w_low = tl.load(norm + lane, mask=lane_mask, other=0.0).to(tl.float32)[None, :]
        w_high = tl.load(norm + HEAD_DIM // 2 + lane, mask=lane_mask, other=0.0).to(tl.float32)[None, :]
    if ROPE:
        cos = tl.load(table, mask=lane_mask, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(table + HEAD_DIM // 2, mask=lane_mask, other=0.0).to(tl.float32)[None, :]
    if EARLY:
        wait()
    a = tl.load(source + token * token_stride + low, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + token * token_stride + high, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + low, mask=mask, other=0.0).to(tl.float32)
        b += tl.load(bias + high, mask=mask, other=0.0).to(tl.float32)
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    if NORM:
        if head < HEADS + KV_HEADS:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
            a = (w_low * (a * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            b = (w_high * (b * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if ROPE:
        if head < HEADS + KV_HEADS:
            turned = a * cos - b * sin
            b = b * cos + a * sin
            a = turned
    if head < HEADS:
        place = out + token * (HEADS * HEAD_DIM) + low
        tl.store(place, a.to(dtype), mask=mask)
        tl.store(place + HEAD_DIM // 2, b.to(dtype), mask=mask)
    else:
        inside = block * cache_block_stride + (at % BLOCK_SIZE) * HEAD_DIM
        cell = inside + heads[:, None] * cache_head_stride + lane[None, :]
        if head < HEADS + KV_HEADS:
            tl.store(k_cache + cell, a.to(dtype), mask=mask)
            tl.store(k_cache + cell + HEAD_DIM // 2, b.to(dtype), mask=mask)
        else:
            tl.store(v_cache + cell, a.to(dtype), mask=mask)
            tl.store(v_cache + cell + HEAD_DIM // 2, b.to(dtype), mask=mask)


def rope_write(
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
    early: bool = False,
) -> Tensor:
    """Queries ready for attention; keys and values in the cache. See `reference_layers.rope_write`.

    `early`: the kernel is one of `kernels.early`.
    """
    tokens, width = q.shape
    _, kv_heads, block_size, head_dim = k_cache.shape
    heads = width // head_dim
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(2) == head_dim and k_cache.stride(3) == 1
    assert cos_sin is None or cos_sin.is_contiguous()
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    q_bias, k_bias, v_bias = biases or (out, out, out)
    q_norm, k_norm = norms or (out, out)
    together = math.gcd(heads, kv_heads)
    tile = min(8, together & -together)  # the largest power of two that divides both
    _rope_write_kernel[(tokens, (heads + 2 * kv_heads) // tile)](
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
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BIAS=biases is not None,
        NORM=norms is not None,
        ROPE=cos_sin is not None,
        HALF=triton.next_power_of_2(head_dim // 2),
        TILE=tile,
        EARLY=early,
        num_warps=max(1, tile // 4),
        launch_pdl=early and q.is_cuda,
    )
    return out
