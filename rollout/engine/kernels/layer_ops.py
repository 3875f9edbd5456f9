"""The fused decoder's operations, by the device of the tensors: Triton on CUDA, the PyTorch reference elsewhere."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine import kernels, reference_layers
from rollout.engine.kernels import tuning

__all__ = [
    "add_norm",
    "attend_and_project",
    "chain_for",
    "decode_attention",
    "early_linear",
    "embed_norm",
    "is_plain",
    "partial_linear",
    "rope_write",
    "silu_mul",
    "streams_head",
]


Chain = Literal["few", "streamed"]
"""The chains of early kernels that run a decode step of few tokens: `kernels.few_products`, `kernels.few_attention` and
`kernels.few_output`, or `kernels.streamed_products` and the attention of other decode steps."""


def product_splits(tokens: int, inputs: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Parts that a product's inner dimension is cut into, and the dtype of their sums. Measured on an H200."""
    if tokens <= 16:
        splits, sums = 4, torch.float32
    elif tokens <= 256:
        splits, sums = 2, tuning.part_dtype(dtype)
    else:
        return 1, dtype
    usable = dtype in (torch.bfloat16, torch.float16) and inputs % (64 * splits) == 0
    return (splits, sums) if usable else (1, dtype)


def partial_linear(x: Tensor, weight: Tensor, chain: Chain | None = None) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T, as partial sums that `add_norm` adds up. `chain`: in one.

    A library's product of few tokens fills the GPU badly where `outputs` is small, and shares its inner dimension by
    way of one more kernel. As a batch of products over parts of it, the next kernel adds the parts up for nothing.

    Returns:
        [splits, tokens, outputs].
    """
    if chain is not None:
        return _products(chain).partial_linear(x, weight)
    tokens, inputs = x.shape
    splits, dtype = product_splits(tokens, inputs, x.dtype) if x.is_cuda else (1, x.dtype)
    if splits == 1:
        return F.linear(x, weight)[None]
    parts = x.unflatten(1, (splits, -1)).transpose(0, 1)  # [splits, tokens, inputs / splits]
    weights = weight.unflatten(1, (splits, -1)).permute(1, 2, 0)  # [splits, inputs / splits, outputs]
    return torch.bmm(parts, weights, out_dtype=dtype)


def is_plain(weight: Tensor) -> bool:
    """Whether early kernels read a weight well: in one piece, 16 bytes at a time, by offsets of 32 bits."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.numel() < 2**31


def chain_for(tokens: int, widths: tuple[int, ...], like: Tensor) -> Chain | None:
    """The chain of early kernels in which a decode step of so many tokens was fastest on an H200; None: in none.

    Args:
        tokens: of the step.
        widths: inner dimensions of the layers' products, the residual stream's first.
        like: of the device and dtype that the products are of.
    """
    if not tuning.may_start_early(like.device) or like.dtype not in (torch.bfloat16, torch.float16):
        return None
    if tokens <= tuning.FEW_TOKENS and widths[0] <= tuning.FEW_WIDTH:
        return "few"
    return "streamed" if tokens <= tuning.STREAMED_TOKENS and tuning.streams(widths) else None


def streams_head(h: Tensor, head: Tensor) -> bool:
    """Whether logits after a chain had better come from `kernels.streamed_products`, too.

    Args:
        h: [rows, hidden], what the chain ends with.
        head: [vocabulary, hidden].
    """
    possible = is_plain(head) and h.dtype == head.dtype and tuning.streams((h.shape[1],))
    return possible and h.shape[0] <= tuning.STREAMED_HEAD_TOKENS


def early_linear(x: Tensor, weight: Tensor, chain: Chain, *, gated: bool = False) -> Tensor:
    """A product of a chain. See `kernels.few_products.linear` and `kernels.streamed_products.linear`."""
    return _products(chain).linear(x, weight, gated=gated)


def _products(chain: Chain) -> Any:
    from rollout.engine.kernels import few_products, streamed_products

    return few_products if chain == "few" else streamed_products


def embed_norm(token_ids: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream's beginning, and that normalised. See `reference_layers.embed_norm`."""
    if embedding.is_cuda:
        from rollout.engine.kernels import rms_norm

        return rms_norm.embed_norm(token_ids, embedding, weight, eps)
    return reference_layers.embed_norm(token_ids, embedding, weight, eps)


def add_norm(residual: Tensor, partial: Tensor, weight: Tensor, eps: float, *, early: bool = False) -> Tensor:
    """Adds partial sums to the residual, in place, and normalises it. See `reference_layers.add_norm`."""
    if residual.is_cuda:
        from rollout.engine.kernels import rms_norm

        return rms_norm.add_norm(residual, partial, weight, eps, early=early)
    return reference_layers.add_norm(residual, partial, weight, eps)


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
    *,
    early: bool = False,
) -> Tensor:
    """Queries ready for attention; keys and values in the cache. See `reference_layers.rope_write`."""
    where = (k_cache, v_cache, block_table, token_row, position)
    if q.is_cuda:
        from rollout.engine.kernels import pointwise

        return pointwise.rope_write(q, k, v, biases, norms, eps, cos_sin, *where, early=early)
    return reference_layers.rope_write(q, k, v, biases, norms, eps, cos_sin, *where)


def decode_attention(
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
    window: int,
    cuts: Tensor | None,
    early: bool = False,
) -> Tensor:
    """A decode step's `rope_write` and attention, in one kernel where that pays: [rows, heads, head dim]."""
    heads = (q, k, v, biases, norms, eps, cos_sin)
    where = (k_cache, v_cache, block_table, token_row, position)
    how: dict[str, Any] = {"scaling": scaling, "window": window, "cuts": cuts}
    _, kv_heads, _, head_dim = k_cache.shape
    sizes = (q.shape[0], kv_heads, head_dim, q.element_size())
    if q.is_cuda and tuning.fuses_attention(*sizes, tuning.sm_count(q.device)):
        from rollout.engine.kernels import fused_attention

        return fused_attention.attend(*heads, *where, **how, early=early)
    return kernels.paged_decode(rope_write(*heads, *where, early=early), *where, **how)


def attend_and_project(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    token_row: Tensor,
    position: Tensor,
    *,
    scaling: float,
    window: int,
    cuts: Tensor | None,
    weight: Tensor,
) -> Tensor:
    """A decode step's attention of few rows, and its product, as partial sums that `add_norm` adds up.

    Args:
        query: [rows, heads, head dim]. This, and all but the last, as `kernels.few_attention.paged_decode` has it.
        weight: [outputs, heads * head dim].

    Returns:
        [splits, rows, outputs].
    """
    from rollout.engine.kernels import few_attention, few_output

    where = (k_cache, v_cache, block_table, token_row, position)
    how: dict[str, Any] = {"scaling": scaling, "window": window, "cuts": cuts}
    if cuts is not None and tuning.joins_in_product(query.shape[0], cuts.shape[0], query.shape[2]):
        pieces = few_output.empty_pieces(query.shape[1], query.shape[2], cuts)
        few_attention.paged_decode(query, *where, **how, pieces=pieces)
        return few_output.join_linear(pieces, weight)
    return partial_linear(few_attention.paged_decode(query, *where, **how).flatten(1), weight, "few")
