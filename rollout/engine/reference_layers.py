"""The fused decoder's operations in plain PyTorch: what its Triton kernels mean, and what a CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) in float32, rounded to x's dtype, times weight: over the last dimension."""
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def embed_norm(token_ids: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Looks tokens up in the table, and normalises what stands there.

    Args:
        token_ids: int32 [tokens].
        embedding: [vocabulary, hidden].
        weight: [hidden], of the residual stream's dtype, which may be narrower than the table's.
        eps: added to the mean square.

    Returns:
        The residual stream, and that normalised, [tokens, hidden] each.
    """
    residual = F.embedding(token_ids, embedding).to(weight.dtype)
    return residual, rms_norm(residual, weight, eps)


def add_norm(residual: Tensor, partial: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds partial sums to the residual stream, in place, and normalises it.

    Args:
        residual: [tokens, hidden], written.
        partial: [splits, tokens, hidden].
        weight: [hidden].
        eps: added to the mean square.

    Returns:
        The normalised residual, [tokens, hidden].
    """
    residual.copy_((_wide(residual) + _wide(partial).sum(0)).to(residual.dtype))
    return rms_norm(residual, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [tokens, features]. Returns [tokens, features], contiguous."""
    return F.silu(gate) * up


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
) -> Tensor:
    """Biases, q/k-norm and rotary position of new queries and keys; keys and values go to the cache.

    Args:
        q: [tokens, heads * head dim]; `k` and `v` alike, with kv heads.
        biases: of q, k and v, or None.
        norms: weights of q-norm and k-norm, [head dim] each, or None.
        eps: of these norms.
        cos_sin: [positions, 2, head dim / 2], cosines and sines of each position, or None for a layer without.
        k_cache: [blocks, kv heads, block size, head dim], written; `v_cache` alike.
        block_table: int32 [rows + 1, blocks of a row].
        token_row: int32 [tokens].
        position: int32 [tokens].

    Returns:
        Queries, [tokens, heads, head dim].
    """
    if biases is not None:
        q, k, v = q + biases[0], k + biases[1], v + biases[2]
    tokens, head_dim = q.shape[0], k_cache.shape[3]
    queries, keys, values = (x.reshape(tokens, -1, head_dim) for x in (q, k, v))  # [tokens, heads, head dim]
    if norms is not None:
        queries, keys = rms_norm(queries, norms[0], eps), rms_norm(keys, norms[1], eps)
    if cos_sin is not None:
        cos, sin = cos_sin[position.long()].unbind(1)  # [tokens, head dim / 2]
        queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
    reference.write_kv(keys, values, k_cache, v_cache, block_table, token_row, position)
    return queries


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _wide(x).chunk(2, dim=-1)
    cos, sin = cos[:, None].to(first.dtype), sin[:, None].to(first.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """In float32, or in float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()
