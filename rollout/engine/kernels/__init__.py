"""The operations the engine's forward pass is made of: KV writes, paged attention, sampling.

Owns the choice of implementation, by the device of the tensors: Triton on CUDA, the PyTorch reference elsewhere.
Triton is imported at the first CUDA call, so a machine without it can import and run the CPU engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rollout.engine import reference
from rollout.engine.kernels.filter import sample_filtered

# NOTE: no submodule may have one of these names: importing it would put it in the function's place in this package.
__all__ = ["decode_cuts", "paged_decode", "paged_prefill", "sample", "sample_filtered", "start_decode", "write_kv"]


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
    cuts: Tensor | None = None,
) -> Tensor:
    """Attention of one query a row over its cache. See `reference.paged_decode`. `cuts` are from `decode_cuts`."""
    how: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap}
    if query.is_cuda:
        from rollout.engine.kernels import decode

        return decode.paged_decode(query, k_cache, v_cache, block_table, token_row, position, **how, cuts=cuts)
    return reference.paged_decode(query, k_cache, v_cache, block_table, token_row, position, **how)


def decode_cuts(token_row: Tensor, position: Tensor, k_cache: Tensor, *, window: int, few: bool) -> Tensor | None:
    """How the step's KV is shared among programs: what all layers with this window hand to their attention.

    Args:
        token_row: int32 [rows].
        position: int32 [rows].
        k_cache: [blocks, kv heads, block size, head dim], of any layer.
        window: how many positions back a row sees, itself included; 0: all.
        few: whether attention is that for few rows, `kernels.few_attention`, and not `paged_decode`.

    Returns:
        None where the implementation needs no such thing.
    """
    if not position.is_cuda or position.numel() == 0:
        return None
    from rollout.engine.kernels import shares

    return shares.decode_cuts(token_row, position, k_cache, window=window, few=few)


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


def sample(
    logits: Tensor,
    key0: Tensor,
    key1: Tensor,
    position: Tensor,
    temperature: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token a row, with its logprob under the full distribution, into `out` if given. See `reference.sample`."""
    if logits.is_cuda:
        from rollout.engine.kernels import sampling

        return sampling.sample(logits, key0, key1, position, temperature, out=out)
    drawn = reference.sample(logits, key0, key1, position, temperature)
    if out is None:
        return drawn
    out[0].copy_(drawn[0])
    out[1].copy_(drawn[1])
    return out


def start_decode(
    token_ids: Tensor,
    carry: Tensor,
    previous_tokens: Tensor,
    token_row: Tensor,
    position: Tensor,
    new_block: Tensor,
    block_table: Tensor,
    row_state: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, the rows' state and sampled tokens' positions; enters new blocks. See `reference.start_decode`."""
    implementation: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference.start_decode
    if token_ids.is_cuda:
        from rollout.engine.kernels import step_start

        implementation = step_start.start_decode
    return implementation(
        token_ids, carry, previous_tokens, token_row, position, new_block, block_table, row_state, block_size
    )
