"""`FusedDecoder`: the forward pass of dense Llama-like models in few kernels, on the Hugging Face module's own weights.

A layer is nine kernels: one product for q, k and v; biases, q/k-norm, rotary position and KV write; attention; the
output product; residual and norm; one product for gate and up; SiLU and multiply; the down product; residual and norm.
In a decode step the second and third are one where that pays (`rollout.engine.kernels.fused_attention`). A decode step
of up to 64 tokens in 16 bits is, on GPUs of compute capability 9.0 and up, a chain of kernels that are launched before
the one before them has ended (see `rollout.engine.kernels.early`), with products of the project's own, which make the
sixth and seventh one, too.

It reads the module's parameters where they are, so whatever shares or exchanges them goes on working. What isn't a
dense Llama, Mistral, Qwen2, Qwen3 or SmolLM3 keeps the module's own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout.engine.attention import PagedStep, attend
from rollout.engine.kernels import layer_ops
from rollout.engine.models.join import joined

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


class Joined:
    """Weights that read the same input, and all of them as one where they lie behind one another."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self.sizes = [w.shape[0] for w in weights]
        self.whole = joined(weights)

    def products(self, x: Tensor, chain: layer_ops.Chain | None = None) -> list[Tensor]:
        """[tokens, inputs] to [tokens, outputs] for each weight; columns of one tensor where they are joined.

        With `chain`, which is for joined weights alone, by one of its kernels.
        """
        if chain is not None:
            assert self.whole is not None
            return list(layer_ops.early_linear(x, self.whole, chain).split(self.sizes, dim=1))
        if self.whole is not None and self.whole.device.type == "cpu":
            self.whole = joined(self.weights)  # unless sharing memory with other processes has moved them apart
        if self.whole is None:
            return [F.linear(x, weight) for weight in self.weights]
        return list(F.linear(x, self.whole).split(self.sizes, dim=1))

    def gated(self, x: Tensor, chain: layer_ops.Chain | None = None) -> Tensor:
        """silu(x @ gate) * (x @ up), where these are the weights. `chain`: as `products` has it."""
        if chain is not None:
            assert self.whole is not None
            return layer_ops.early_linear(x, self.whole, chain, gated=True)
        gate, up = self.products(x)
        return layer_ops.silu_mul(gate, up)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, where the module holds them."""

    qkv: Joined
    biases: tuple[Tensor, Tensor, Tensor] | None
    head_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    gate_up: Joined
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    window: int
    rope: bool
    scaling: float

    def is_plain(self) -> bool:
        """Whether its weights lie in memory as early kernels read them."""
        weights = (self.qkv.whole, self.gate_up.whole, self.output, self.down)
        return all(weight is not None and layer_ops.is_plain(weight) for weight in weights)


_HeadWork = tuple[tuple[Tensor, Tensor, Tensor] | None, tuple[Tensor, Tensor] | None, float, Tensor | None]


def obstacle(module: nn.Module) -> str | None:
    """Why `module` can't be run by `FusedDecoder`, or None if it can."""
    config: Any = module.config
    if config.model_type not in MODEL_TYPES:
        return f"its type is {config.model_type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    for layer in module.model.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp
        plain = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        products = (*plain, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if any(type(p) is not nn.Linear for p in products):
            return "a projection is no plain nn.Linear"
        if any(p.bias is not None for p in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            return "its output or MLP projections have biases"
        if len({p.bias is None for p in plain[:3]}) > 1:
            return "some of q, k and v have biases and some don't"
    head = module.get_output_embeddings().weight  # type: ignore[operator]
    dtypes = {p.dtype for p in module.parameters() if p is not head}
    return f"its parameters are of {len(dtypes)} dtypes beside the head's" if len(dtypes) > 1 else None


class FusedDecoder:
    """Runs a dense decoder's forward pass over its module's parameters.

    Args:
        module: a Hugging Face causal language model for which `obstacle` gives None.
        max_positions: positions that rotary cosines and sines are kept for.
    """

    def __init__(self, module: nn.Module, max_positions: int) -> None:
        model: Any = module.model
        self.eps = float(module.config.rms_norm_eps)  # type: ignore[union-attr, arg-type]
        self.embedding: Tensor = model.embed_tokens.weight
        self.final_norm: Tensor = model.norm.weight
        self.head: Tensor = module.get_output_embeddings().weight  # type: ignore[operator]
        self.layers = [_read_layer(layer) for layer in model.layers]
        self._is_plain = all(layer.is_plain() for layer in self.layers)
        self.cos_sin = _rotary_table(model.rotary_emb, max_positions, self.final_norm)

    def __call__(self, token_ids: Tensor, step: PagedStep, last: Tensor | None) -> Tensor:
        """Logits of every token, or of those at `last`: [rows, vocabulary].

        Args:
            token_ids: int32 [tokens].
            step: where the tokens stand in the cache.
            last: int64 [rows], or None.
        """
        chain = self._chain(token_ids.shape[0]) if step.query_start is None else None
        if chain is not None:
            # Attention reads cuts before it waits, so they come before the last ordinary kernel: see `kernels.early`.
            for window in {layer.window for layer in self.layers}:
                step.cuts(window, few=chain == "few")
        h = self._layers(token_ids, step, chain)
        return self._logits(h if last is None else h.index_select(0, last), chain)

    def _layers(self, token_ids: Tensor, step: PagedStep, chain: layer_ops.Chain | None) -> Tensor:
        """The normalised residual stream behind the layers, [tokens, hidden]. `chain`: by early kernels, in a chain."""
        early = chain is not None
        # the residual stream and what its next norm makes of it, [tokens, hidden] each
        x, h = layer_ops.embed_norm(token_ids, self.embedding, self.layers[0].attention_norm, self.eps)
        for index, (layer, next_norm) in enumerate(zip(self.layers, self._next_norms(), strict=True)):
            q, k, v = layer.qkv.products(h, chain)
            y = self._attend(q, k, v, layer, index, step, chain)
            h = layer_ops.add_norm(x, y, layer.mlp_norm, self.eps, early=early)
            y = layer_ops.partial_linear(layer.gate_up.gated(h, chain), layer.down, chain)
            h = layer_ops.add_norm(x, y, next_norm, self.eps, early=early)
        return h

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: _Layer, index: int, step: PagedStep, chain: layer_ops.Chain | None
    ) -> Tensor:
        """From the products for q, k and v to partial sums of the output product, [splits, tokens, hidden]."""
        heads, where = (q, k, v, *self._heads(layer)), step.where(index)
        how: dict[str, Any] = {"scaling": layer.scaling, "window": layer.window}
        if chain == "few":
            query, cuts = layer_ops.rope_write(*heads, *where, early=True), step.cuts(layer.window, few=True)
            return layer_ops.attend_and_project(query, *where, **how, cuts=cuts, weight=layer.output)
        if step.query_start is not None:
            attended = attend(layer_ops.rope_write(*heads, *where), step, index, **how)
        else:
            cuts = step.cuts(layer.window)
            attended = layer_ops.decode_attention(*heads, *where, **how, cuts=cuts, early=chain is not None)
        return layer_ops.partial_linear(attended.flatten(1), layer.output, chain)

    def _heads(self, layer: _Layer) -> _HeadWork:
        """What is done to queries, keys and values."""
        return layer.biases, layer.head_norms, self.eps, self.cos_sin if layer.rope else None

    def _next_norms(self) -> list[Tensor]:
        """The norm that follows each layer."""
        return [layer.attention_norm for layer in self.layers[1:]] + [self.final_norm]

    def _chain(self, tokens: int) -> layer_ops.Chain | None:
        """The chain of early kernels for a decode step of so many tokens, if there is one."""
        if not self._is_plain:
            return None
        widths = (self.final_norm.shape[0], self.layers[0].output.shape[1], self.layers[0].down.shape[1])
        return layer_ops.chain_for(tokens, widths, self.final_norm)

    def _logits(self, h: Tensor, chain: layer_ops.Chain | None) -> Tensor:
        """[rows, hidden], from a chain or not, to [rows, vocabulary], in the head's dtype."""
        if chain is not None and layer_ops.streams_head(h, self.head):
            return layer_ops.early_linear(h, self.head, "streamed")
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h.to(self.head.dtype), self.head)


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = getattr(attention, "q_norm", None) is not None
    biased = attention.q_proj.bias is not None
    return _Layer(
        qkv=Joined([p.weight for p in projections]),
        biases=tuple(p.bias for p in projections) if biased else None,
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        output=attention.o_proj.weight,
        gate_up=Joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        window=_window(attention),
        rope=bool(getattr(attention, "use_rope", True)),
        scaling=float(attention.scaling),
    )


def _window(attention: Any) -> int:
    """The sliding window that this layer's own forward would ask for, 0 for none."""
    if attention.config.model_type == "mistral":  # which hands its config's window on from the forward
        return int(attention.config.sliding_window or 0)
    return int(getattr(attention, "sliding_window", None) or 0)


@torch.no_grad()
def _rotary_table(rotary: Any, positions: int, like: Tensor) -> Tensor:
    """Cosines and sines of every position, as the module computes and rounds them: [positions, 2, head dim / 2]."""
    parts = []
    for start in range(0, positions, 4096):
        at = torch.arange(start, min(start + 4096, positions), device=like.device)[None]
        cos, sin = rotary(like[:1], at)  # [1, positions, head dim], each half twice
        half = cos.shape[-1] // 2
        parts.append(torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1))
    return torch.cat(parts).to(like.dtype).contiguous()
