"""The fused decoder's operations, by the device of the tensors: Triton on CUDA, the PyTorch reference elsewhere."""

from __future__ import annotations

from torch import Tensor

from rollout.engine import reference_layers

__all__ = ["add_norm", "rope_write", "silu_mul"]


def add_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds to the residual, in place, and normalises it. See `reference_layers.add_norm`."""
    if residual.is_cuda:
        from rollout.engine.kernels import pointwise

        return pointwise.add_norm(residual, x, weight, eps)
    if x is None:
        return reference_layers.rms_norm(residual, weight, eps)
    return reference_layers.add_norm(residual, x, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [tokens, features]. See `reference_layers.silu_mul`."""
    if gate.is_cuda:
        from rollout.engine.kernels import pointwise

        return pointwise.silu_mul(gate, up)
    return reference_layers.silu_mul(gate, up)


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
    """Queries ready for attention; keys and values in the cache. See `reference_layers.rope_write`."""
    if q.is_cuda:
        from rollout.engine.kernels.pointwise import rope_write as implementation
    else:
        implementation = reference_layers.rope_write
    return implementation(q, k, v, biases, norms, eps, cos_sin, k_cache, v_cache, block_table, token_row, position)
