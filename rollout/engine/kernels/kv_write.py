"""Triton: write new keys and values into their blocks.

Owns the store. One program a token copies all of its kv heads, so a decode step is one small launch a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["table_stride"])
def _write_kv_kernel(
    key,
    value,
    k_cache,
    v_cache,
    block_table,
    token_row,
    position,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(position + token)
    row = tl.load(token_row + token).to(tl.int64)
    block = tl.load(block_table + row * table_stride + at // BLOCK_SIZE).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    mask = (head < KV_HEADS) & (dim < HEAD_DIM)
    place = block * cache_block_stride + head * cache_head_stride + (at % BLOCK_SIZE) * HEAD_DIM + dim
    new_key = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=mask)
    new_value = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=mask)
    tl.store(k_cache + place, new_key.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(v_cache + place, new_value.to(v_cache.dtype.element_ty), mask=mask)


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    token_row: Tensor,
    position: Tensor,
) -> None:
    """Write each token's key and value into its place in the cache. See `reference.write_kv`."""
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    check_cache(k_cache, v_cache)
    assert key.stride(-1) == value.stride(-1) == 1
    _write_kv_kernel[(tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        block_table,
        token_row,
        position,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_table.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        PADDED_HEADS=triton.next_power_of_2(kv_heads),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4 if kv_heads * head_dim >= 1024 else 2,
    )


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """The layout that the kernels take for granted: K alike V, and each block's positions contiguous."""
    assert k_cache.stride() == v_cache.stride() and k_cache.shape == v_cache.shape
    assert k_cache.stride(3) == 1 and k_cache.stride(2) == k_cache.shape[3]
    assert k_cache.dtype == v_cache.dtype and k_cache.dtype in (torch.bfloat16, torch.float16, torch.float32)
