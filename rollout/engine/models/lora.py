"""Owns what PEFT did to a learner: which module is in use, and the weight that a LoRA layer amounts to.

The merged weight is what the layer's forward computes with, read at the moment of the call: active adapters only, none
where they are disabled. The learner's own weights are only ever read. Refuses what isn't a weight (prompt tuning,
aLoRA) and adapters other than LoRA and DoRA. Imported without peft; used only where peft is loaded already.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def check_config(learner: Any) -> None:
    """Raises ValueError if a PeftModel's method isn't one that changes weights."""
    for name, config in learner.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the learner's PEFT adapter {name!r} is {type(config).__name__}, which adds prompts instead of "
                "changing weights: use LoraConfig"
            )


@lru_cache(maxsize=1024)
def adapts(cls: type) -> bool:
    """Whether modules of this class wrap another one on PEFT's behalf."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return issubclass(cls, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def module_in_use(module: Any, prefix: str) -> nn.Module | None:
    """The module that a `modules_to_save` wrapper's forward runs; None if `module` is no such wrapper."""
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if not isinstance(module, AuxiliaryTrainingWrapper):
        return None
    if not isinstance(module, ModulesToSaveWrapper):
        raise ValueError(
            f"{prefix[:-1]} is wrapped in PEFT's {type(module).__name__}, which can't be merged: "
            "train the whole module with modules_to_save"
        )
    active = list(module.active_adapters)
    if module.disable_adapters or not active or any(name not in module.modules_to_save for name in active):
        return _module(module.original_module)
    return _module(module.modules_to_save[active[0]])


def base_layer(module: Any, prefix: str) -> tuple[nn.Module, dict[str, tuple[nn.Module, ...]]] | None:
    """The layer that a LoRA layer adapts, and the adapting layers by the name of the parameter; None for other modules.

    Whether adapters are active right now plays no part: a parameter that an adapter may change counts as adapted.
    """
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(module, BaseTunerLayer):
        return None
    param_wrapper = getattr(lora.layer, "ParamWrapper", ())
    adapted: dict[str, tuple[nn.Module, ...]] = {}
    layer: Any = module
    while isinstance(layer, BaseTunerLayer):  # wrappers of several parameters of one module are nested
        if isinstance(layer, param_wrapper):
            names = [layer.parameter_name]
        elif isinstance(layer, (lora.Linear, lora.Embedding)):
            names = ["weight", "bias"] if any(getattr(layer, "lora_bias", {}).values()) else ["weight"]
        else:
            raise ValueError(
                f"{prefix[:-1]} is a PEFT layer of type {type(layer).__module__}.{type(layer).__name__}, which can't "
                "be merged: use LoraConfig on linear layers and embeddings, over weights that aren't quantised"
            )
        _check_layer(layer, prefix)
        for name in names:
            adapted[name] = (layer, *adapted.get(name, ()))
        layer = layer.base_layer
    return _module(layer), adapted


def merge(weight: Tensor, name: str, layers: tuple[nn.Module, ...]) -> Tensor:
    """`weight` plus what the layers' active adapters add to it: a new tensor, rounded no more than its parts are.

    Args:
        weight: the base layer's parameter, whole.
        name: its name in the base layer ("weight", "bias", or that of an expert's parameter).
        layers: the PEFT layers around it, innermost first.
    """
    total = weight.clone()
    for layer in layers:
        for adapter in _active(layer):
            delta = _delta(layer, adapter, name).to(weight.device)
            if delta.dtype != total.dtype:
                total = total.to(torch.promote_types(total.dtype, delta.dtype))
            total += delta
            if _is_dora(layer, adapter):
                total *= _dora_factor(layer, adapter, weight, delta)
    return total


def _delta(layer: Any, adapter: str, name: str) -> Tensor:
    if name == "bias":
        return whole(layer.lora_B[adapter].bias.detach()) * layer.scaling[adapter]
    return whole(layer.get_delta_weight(adapter).detach())


def _dora_factor(layer: Any, adapter: str, weight: Tensor, delta: Tensor) -> Tensor:
    """What brings each output's row to its trained length. [out, 1], or [1, out] for a transposed weight.

    The length before is that of the base weight plus this adapter's delta alone, in forward as in peft's own merging,
    even where other adapters came before.
    """
    rows = weight + delta
    if layer.fan_in_fan_out:
        rows = rows.T
    length = torch.linalg.norm(rows, dim=1).to(rows.dtype)  # [out]
    trained = whole(layer.lora_magnitude_vector[adapter].weight.detach()).to(weight.device)  # [out]
    factor = (trained / length)[:, None]
    return factor.T if layer.fan_in_fan_out else factor


def _active(layer: Any) -> list[str]:
    """The adapters whose deltas a forward would add to the base weight as it stands."""
    if layer.merged or layer.disable_adapters:
        return []
    known = layer.lora_embedding_A if len(layer.lora_embedding_A) else layer.lora_A
    return [adapter for adapter in layer.active_adapters if adapter in known]


def _check_layer(layer: Any, prefix: str) -> None:
    from peft.tuners import lora

    if layer.merged and layer.disable_adapters:
        raise ValueError(
            "the learner's adapters are merged and disabled at once, so its base weights hold deltas that its next "
            "forward takes out: call unmerge_adapter() before"
        )
    dora = [adapter for adapter, used in layer.use_dora.items() if used]
    if dora and not isinstance(layer, lora.Linear):
        raise ValueError(f"{prefix[:-1]} uses DoRA on an embedding, which can't be merged: leave it to LoRA")
    for adapter, variant in getattr(layer, "lora_variant", {}).items():
        if adapter not in dora:
            raise ValueError(
                f"{prefix[:-1]} uses the LoRA variant {type(variant).__name__}, which can't be merged: "
                "use plain LoRA, rsLoRA or DoRA"
            )
    for used in getattr(layer, "lora_bias", {}).values():
        if used and getattr(layer.get_base_layer(), "bias", None) is None:
            raise ValueError(f"{prefix[:-1]} has lora_bias=True but no bias to merge it into: set lora_bias=False")


def _is_dora(layer: Any, adapter: str) -> bool:
    return bool(layer.use_dora.get(adapter, False))


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor (FSDP2, tensor parallel)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered, which every rank of its mesh has to do at the same point; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def _module(module: Any) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module
