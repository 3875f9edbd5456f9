"""Tiny random models of every architecture that the engine is tested with, and a fingerprint of a learner's state."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from rollout import Completion

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HALF_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 32, "tie_word_embeddings": True, **_HALF_SLIDING}),
    "gemma3": ("Gemma3", {"head_dim": 32, "tie_word_embeddings": True, **_HALF_SLIDING}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
ARCHITECTURES = tuple(_SPECS)


def tiny(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A model of that architecture in float32 on the CPU, in training mode, its biases and norms random too."""
    family, own = _SPECS[name]
    config_class = getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")
    config = config_class(**{**SIZES, **own, **overrides})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def peaked() -> Any:
    """A tiny Llama whose distributions have a shape, for filters to cut, in evaluation mode."""
    model = tiny("llama").eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    return model


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    """What was generated. Logprobs may differ in their last bit with the batch's size; tokens don't."""
    return [[completion.token_ids for completion in group] for group in groups]


def fingerprint(learner: nn.Module) -> dict[str, Any]:
    """All that an engine must leave alone: equal before and after, or the learner was touched."""
    modules = list(learner.named_modules())
    configs = {id(m.config): m.config for _, m in modules if isinstance(m, transformers.PreTrainedModel)}
    return {
        "training": [(n, m.training) for n, m in modules],
        "checkpointing": [(n, m.gradient_checkpointing) for n, m in modules if hasattr(m, "gradient_checkpointing")],
        "hooks": [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules],
        "parameters": [
            (n, id(p), p.data_ptr(), p.dtype, p.device, p.requires_grad, p._version, p.detach().clone().tolist())
            for n, p in learner.named_parameters(remove_duplicate=False)
        ],
        "buffers": [(n, id(b), b.data_ptr(), b.dtype, b.tolist()) for n, b in learner.named_buffers()],
        "configs": [
            (c.to_dict(), c._attn_implementation, getattr(c, "_experts_implementation", None)) for c in configs.values()
        ],
        "rng": torch.get_rng_state().tolist(),
        "default_dtype": torch.get_default_dtype(),
    }


def ragged_prompts(lengths: tuple[int, ...], *, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
