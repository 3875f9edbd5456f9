"""Paged attention for Hugging Face modules, registered with transformers as attention implementation "rollout".

A model that fetches its attention through `AttentionInterface` calls `paged_attention` in each layer with the new
tokens' queries, keys and values. It writes the keys and values to the cache, then attends over the row's blocks. What
it needs to know about the step travels as the keyword argument `paged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from rollout.engine import kernels

ATTENTION = "rollout"
"""Name of the attention implementation in a model's config."""


@dataclass(slots=True)
class PagedStep:
    """Where a step's tokens stand in the cache. Tensors are on the model's device."""

    kv: Tensor  # [blocks, layers, 2, kv heads, block size, head dim]
    block_table: Tensor  # int32 [rows + 1, blocks of a row]
    token_row: Tensor  # int32 [tokens]
    position: Tensor  # int32 [tokens]
    query_start: Tensor | None = None  # int32 [seqs + 1] in a prefill; None: one token a row
    seq_row: Tensor | None = None  # int32 [seqs] in a prefill
    max_query_len: int = 1
    windows: dict[int, int] = field(default_factory=dict)  # of the layers that have attended, to check a model
    _cuts: dict[tuple[int, bool], Tensor | None] = field(default_factory=dict)  # by window and `few`

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, [blocks, kv heads, block size, head dim] each."""
        return self.kv[:, index, 0], self.kv[:, index, 1]

    def where(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A layer's keys and values, the block table, and the tokens' rows and positions."""
        return *self.layer(index), self.block_table, self.token_row, self.position

    def cuts(self, window: int, *, few: bool = False) -> Tensor | None:
        """How a decode step's KV is shared among programs, for all layers with this window. Found once a step."""
        key = (window, few)
        if key not in self._cuts:
            k_cache, _ = self.layer(0)
            self._cuts[key] = kernels.decode_cuts(self.token_row, self.position, k_cache, window=window, few=few)
        return self._cuts[key]


def attend(
    query: Tensor,
    step: PagedStep,
    layer: int,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of the step's tokens over their rows, whose keys and values are in the cache.

    Args:
        query: [tokens, heads, head dim].
        step: where the tokens stand.
        layer: the layer's index.
        scaling: of the scores.
        window: how many positions back a token sees, itself included; 0: all.
        softcap: bound on the scores by tanh; 0: none.

    Returns:
        [tokens, heads, head dim].
    """
    k_cache, v_cache = step.layer(layer)
    how: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap}
    if step.query_start is None:
        return kernels.paged_decode(query, *step.where(layer), **how, cuts=step.cuts(window))
    assert step.seq_row is not None
    return kernels.paged_prefill(
        query,
        k_cache,
        v_cache,
        step.block_table,
        step.seq_row,
        step.query_start,
        step.position,
        max_query_len=step.max_query_len,
        **how,
    )


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: PagedStep | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Writes this layer's new keys and values, then attends. The signature is transformers' attention interface.

    Args:
        module: the attention layer, for its `layer_idx`.
        query: [1, heads, tokens, head dim].
        key: [1, kv heads, tokens, head dim], positions already encoded.
        value: like `key`.
        attention_mask: always None: who attends to whom follows from `paged`.
        scaling: of the scores; 1/sqrt(head dim) where None.
        sliding_window: how many positions back a token sees, itself included.
        softcap: bound on the scores by tanh.
        paged: the step.

    Returns:
        [1, tokens, heads, head dim], and None in the place of attention weights.

    Raises:
        ValueError: the model doesn't hand its keyword arguments on to its layers, or asks for what there isn't.
    """
    if paged is None:
        raise ValueError(
            f"{type(module).__name__} was called with attention {ATTENTION!r} outside of a rollout engine, or its "
            "model doesn't pass keyword arguments on to its attention layers, and so can't be run by rollout"
        )
    for unsupported in ("s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{type(module).__name__} uses {unsupported!r}, which paged attention doesn't support")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} makes a mask of its own, which paged attention doesn't know: rollout can't run "
            "this model"
        )
    if layer in paged.windows:
        raise ValueError(
            f"layer {layer} of {type(module).__name__} attends twice in one pass, but there is one place in the KV "
            "cache for it: rollout can't run this model"
        )
    paged.windows[layer] = sliding_window or 0
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [tokens, heads, head dim]
    k_cache, v_cache = paged.layer(layer)
    expected = (k_cache.shape[1], k_cache.shape[3])
    if k.shape[1:] != expected or v.shape[1:] != expected or q.shape[2] != expected[1]:
        raise ValueError(
            f"layer {layer} of {type(module).__name__} has keys {list(k.shape[1:])} and values {list(v.shape[1:])} a "
            f"token, but its config says {list(expected)} (heads, size): rollout can't run this model"
        )
    kernels.write_kv(k, v, k_cache, v_cache, paged.block_table, paged.token_row, paged.position)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(q, paged, layer, scaling=scale, window=sliding_window or 0, softcap=softcap or 0.0)
    return out.unsqueeze(0), None


def register() -> None:
    """Makes the implementation known to transformers. No mask function goes with it, so models build no masks."""
    AttentionInterface.register(ATTENTION, paged_attention)


register()
