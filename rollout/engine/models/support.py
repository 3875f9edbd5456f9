"""Owns what the engine can run: the checks of a learner, each with its reason, and the sizes read from a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollout.engine.models.learner import Source, unwrap

_LAYER_TYPES = ("full_attention", "sliding_attention")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_DIMS = range(16, 257, 16)


@dataclass(frozen=True)
class ModelShape:
    """The sizes by which the engine lays out its KV cache and buffers."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


def model_shape(module_or_config: Any) -> ModelShape:
    """Reads the sizes from a model (wrapped or not) or from a Hugging Face config.

    Raises ValueError where layers differ in their heads, or a head's size is none that the kernels know.
    """
    config = module_or_config
    if isinstance(config, nn.Module):
        config = unwrap(config).config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    head_dim = _size(config, "head_dim", default=_size(config, "hidden_size") // heads)
    if head_dim not in _HEAD_DIMS:
        raise ValueError(f"heads of size {head_dim} can't be run: a multiple of 16, from 16 to 256, is needed")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads can't share {kv_heads} key/value heads evenly")
    return ModelShape(
        num_layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size"),
        max_position_embeddings=_size(config, "max_position_embeddings"),
    )


def check_learner(model: Any, named: Mapping[str, Source], dtype: torch.dtype) -> type:
    """Raises ValueError for an unwrapped learner that the engine can't run; returns the class to build."""
    if dtype not in _DTYPES:
        raise ValueError(f"the engine runs in bfloat16, float16 or float32, not in {dtype}: change dtype")
    config = getattr(model, "config", None)
    if config is None or not hasattr(type(model), "_from_config"):
        raise ValueError(
            f"{type(model).__name__} isn't a Hugging Face model: pass a PreTrainedModel such as LlamaForCausalLM, "
            "alone or in DDP, torch.compile or PEFT"
        )
    cls = next(c for c in type(model).__mro__ if "FSDPModule" not in {base.__name__ for base in c.__mro__})
    _check_class(cls, config)
    _check_config(config, cls.__name__)
    _check_tensors(model, named)
    model_shape(config)
    return cls


def check_skeleton(skeleton: nn.Module) -> None:
    """Raises ValueError for what only the built modules tell: sinks, later tokens, positions, heads that differ."""
    name = type(skeleton).__name__
    sinks = [n for n, _ in skeleton.named_parameters() if n.rpartition(".")[2] in ("sinks", "sink")]
    if sinks:
        raise ValueError(f"{name} adds attention sinks ({sinks[0]}), which the engine's attention doesn't know")
    shape = model_shape(skeleton)
    layers: set[int] = set()
    for path, module in skeleton.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise ValueError(
                f"{name} attends to later tokens ({path}), so it can't be decoded token by token: load a causal model "
                "(of BERT's kind: one with config.is_decoder)"
            )
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            raise ValueError(
                f"{name} counts positions from its padding token's id on ({path}), and rollout from 0: it can't be run"
            )
        head_dim, layer = getattr(module, "head_dim", None), getattr(module, "layer_idx", None)
        if not isinstance(head_dim, int) or not isinstance(layer, int):
            continue
        layers.add(layer)
        widths = [getattr(getattr(module, p, None), "out_features", None) for p in ("k_proj", "v_proj")]
        wrong = [w for w in widths if w is not None and w != shape.kv_heads * shape.head_dim]
        if head_dim != shape.head_dim or wrong:
            raise ValueError(
                f"{name} has layers whose heads differ ({path}: size {head_dim}, projected to {widths}; by the config "
                f"{shape.kv_heads} of size {shape.head_dim}): one KV cache can't hold them"
            )
    if layers and layers != set(range(shape.num_layers)):
        raise ValueError(f"{name} has attention in layers {sorted(layers)} of {shape.num_layers}: it is needed in all")


def _check_class(cls: Any, config: Any) -> None:
    name = cls.__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} is an encoder-decoder: only decoder-only language models are supported")
    if getattr(cls, "_is_stateful", False):
        raise ValueError(f"{name} keeps a recurrent (state-space) state, which the engine's KV cache can't hold")
    replaceable = getattr(cls, "_can_set_attn_implementation", lambda: True)()  # looks into the module's source
    if not getattr(cls, "_supports_attention_backend", False) or not replaceable:
        raise ValueError(
            f"{name} doesn't let its attention be replaced (no attention-backend support): use a model that "
            "calls transformers' attention interface, such as Llama, Mistral, Qwen or Gemma"
        )
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        raise ValueError(
            f"{name}.forward takes no logits_to_keep, so it would compute the logits of every prompt token: "
            "pass a model with a language modelling head (...ForCausalLM)"
        )


def _check_config(config: Any, name: str) -> None:
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ValueError(f"{name} is more than a text model: pass its text-only class (for Gemma 3, Gemma3ForCausalLM)")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name}'s weights are quantised: load the learner without a quantization_config")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if other:
        raise ValueError(f"{name} has layers of type {', '.join(other)}: only {' and '.join(_LAYER_TYPES)} are run")
    v_head_dim = getattr(config, "v_head_dim", None)
    if getattr(config, "kv_lora_rank", None) or (v_head_dim and v_head_dim != model_shape(config).head_dim):
        raise ValueError(
            f"{name} uses multi-head latent attention (its values have a size of their own), not supported"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{name} has layers that read other layers' keys and values, which isn't supported")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ValueError(f"{name} attends to later tokens, so it can't be decoded token by token")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"{name} uses {rope_type!r} rotary scaling, which changes all positions by the longest sequence of a "
                "batch: a completion would depend on its neighbours. Set a fixed one in config.rope_parameters "
                "(default, linear, yarn or llama3)"
            )


def _check_tensors(model: Any, named: Mapping[str, Source]) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the learner's weights are quantised: load it without a quantization_config")
    devices = {source.device for source in named.values()}
    if any(device.type == "meta" for device in devices):
        raise ValueError(
            "the learner has parameters on the meta device (offloaded, or never loaded): "
            "load it whole onto one device, without device_map offloading"
        )
    if len(devices) > 1:
        raise ValueError(
            f"the learner lies on several devices ({', '.join(sorted(map(str, devices)))}): "
            "load it onto one, without device_map"
        )
    for name, source in named.items():
        if source.is_parameter and source.dtype not in (*_DTYPES, torch.float64):
            raise ValueError(f"the learner's {name} is {source.dtype} (quantised?): load it in bfloat16 or float32")


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, Mapping):
        return set()
    found = {parameters.get("rope_type", parameters.get("type"))}
    for value in parameters.values():
        found |= _rope_types(value)
    return {rope_type for rope_type in found if isinstance(rope_type, str)}


def _size(config: Any, name: str, default: int | None = None) -> int:
    try:
        value = getattr(config, name, None)
    except Exception as error:  # how a config says that it has one for each layer, in a class of its own
        raise ValueError(f"the model's layers differ in {name}: one KV cache can't hold them") from error
    if value is None:
        value = default
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise ValueError(f"the model's layers differ in {name} ({value}): one KV cache can't hold them")
        value = value[0]
    if not isinstance(value, int):
        raise ValueError(f"{type(config).__name__} says nothing of {name}, by which the engine sizes its buffers")
    return value
