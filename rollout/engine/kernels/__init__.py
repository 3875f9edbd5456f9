"""The operations the engine's forward pass is made of: KV writes, paged attention, sampling.

Owns the choice of implementation, by the device of the tensors: Triton on CUDA, the PyTorch reference elsewhere.
Triton is imported at the first CUDA call, so a machine without it can import and run the CPU engine.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rollout.engine import reference
from rollout.engine.kernels.filter import sample_filtered

# NOTE: no submodule may have one of these names: importing it would put it in the function's place in this package.
__all__ = ["paged_decode", "paged_prefill", "sample", "sample_filtered", "write_kv"]


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
    implementation: Callable[..., None] = reference.write_kv
    if key.is_cuda:
        from rollout.engine.kernels import kv_write

        implementation = kv_write.write_kv
    implementation(key, value, k_cache, v_cache, block_table, token_row, position)


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
    softcap: float = 0.0,
) -> Tensor:
    """Attention of one query a row over the row's cache. See `reference.paged_decode`."""
    implementation: Callable[..., Tensor] = reference.paged_decode
    if query.is_cuda:
        from rollout.engine.kernels import decode

        implementation = decode.paged_decode
    return implementation(
        query, k_cache, v_cache, block_table, token_row, position, scaling=scaling, window=window, softcap=softcap
    )


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
) -> Tensor:
    """Causal attention of ragged prompt chunks over their rows' cache. See `reference.paged_prefill`."""
    implementation: Callable[..., Tensor] = reference.paged_prefill
    if query.is_cuda:
        from rollout.engine.kernels import prefill

        implementation = prefill.paged_prefill
    return implementation(
        query,
        k_cache,
        v_cache,
        block_table,
        seq_row,
        query_start,
        position,
        scaling=scaling,
        window=window,
        softcap=softcap,
        max_query_len=max_query_len,
    )


def sample(logits: Tensor, key0: Tensor, key1: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token a row, with its logprob under the full distribution. See `reference.sample`."""
    implementation: Callable[..., tuple[Tensor, Tensor]] = reference.sample
    if logits.is_cuda:
        from rollout.engine.kernels import sampling

        implementation = sampling.sample
    return implementation(logits, key0, key1, position, temperature)
