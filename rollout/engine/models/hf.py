"""Owns the engine's module: the learner's Hugging Face class, built anew over the learner's storage.

The learner is only read. What the engine can't run is refused here, before anything is allocated: see `rollout.engine.
models.support`.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine.attention import ATTENTION
from rollout.engine.models.learner import (
    Source,
    distinct,
    non_persistent_buffers,
    persistent_buffers,
    sources,
    unwrap,
    write,
)
from rollout.engine.models.support import ModelShape, check_learner, check_skeleton, model_shape

__all__ = ["ModelShape", "build_module", "capture_obstacle", "model_shape"]


# What a config may ask of a forward that costs time and that the engine doesn't read.
_QUIET = {
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}


Allocate = Callable[[Sequence[tuple[torch.Size, torch.dtype]]], list[Tensor]]
"""Makes a tensor for each shape and dtype, all at once, on the engine's device."""


def build_module(
    learner: nn.Module, *, device: torch.device | str, dtype: torch.dtype, allocate: Allocate | None = None
) -> nn.Module:
    """The engine's own module: the learner's class and config, attention "rollout", eval mode, nothing trainable.

    A parameter on `device` and of `dtype` shares the learner's storage, so the optimiser's in-place steps reach the
    engine by themselves. Every other one is the engine's own, filled once here and by `WeightExchange` from then on.
    LoRA is merged into tensors of the engine's own. Persistent buffers are treated alike but keep their dtype; the
    others (rotary frequencies) are copied. The learner is never cast, moved or toggled.

    Args:
        learner: a Hugging Face causal language model; may be wrapped in DDP, torch.compile or PEFT.
        device: where the engine runs.
        dtype: bfloat16, float16 or float32, for every parameter that the class doesn't keep in float32, nor the learner
            its head alone (as TRL does for `cast_lm_head_to_fp32`).
        allocate: makes the engine's own tensors, called once with all of them; None: PyTorch does.

    Raises ValueError, saying why, for a learner that the engine can't run.
    """
    device = _indexed(torch.device(device))
    model = unwrap(learner)
    named = sources(learner)
    cls = check_learner(model, named, dtype)
    # Inference tensors couldn't be written outside of inference mode, and tensors made here live for the whole run.
    with torch.inference_mode(False), torch.no_grad():
        skeleton = _on_meta(cls, model.config, dtype)
        check_skeleton(skeleton)
        _check_names(skeleton, named, cls)
        origins = _fill(skeleton, named, device, dtype, allocate)
        _cast_around_head(skeleton, dtype)
        _copy_buffers(skeleton, learner, device)
    # NOTE: by these, an exchange knows whether storage that the engine shares is still in its owner's use.
    skeleton.__dict__["_rollout_origins"] = origins  # name -> weak reference
    return skeleton.eval().requires_grad_(False)


def capture_obstacle(module: nn.Module) -> str | None:
    """Why the module's forward can't be captured in a CUDA graph, or None if it can."""
    experts = [name for name, _ in module.named_parameters() if name.endswith("experts.gate_up_proj")]
    dtype = compute_dtype(module)
    if experts and dtype != torch.bfloat16:
        return f"grouped matrix products of experts run in bfloat16 only without the host's help, not in {dtype}"
    return None


def compute_dtype(module: Any) -> torch.dtype:
    """What the engine's module computes in: the dtype of its weights, of which a head may be kept in float32."""
    head = getattr(module.get_output_embeddings(), "weight", None)
    return next(parameter.dtype for parameter in module.parameters() if parameter is not head)


def body_dtype(named: Mapping[str, Source]) -> torch.dtype:
    """The dtype of most of a learner's matrices: a head, embeddings or routers may be kept in another."""
    matrices = [source.dtype for source in distinct(named).values() if source.is_parameter and len(source.shape) > 1]
    floating = [dtype for dtype in matrices if dtype.is_floating_point]  # quantised ones are refused later, with reason
    return Counter(floating or [torch.float32]).most_common(1)[0][0]


def _on_meta(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    config = copy.deepcopy(config)
    for name, value in _QUIET.items():
        if hasattr(config, name):
            setattr(config, name, value)
    options: dict[str, Any] = {"dtype": dtype}
    if getattr(cls, "_can_set_experts_implementation", lambda: False)():
        # "eager" asks the host which experts were hit, and "batched_mm" copies an expert's weights for each token.
        options["experts_implementation"] = "grouped_mm"
    # Initialisers draw from the generators even on meta, and the learner's run is not to change by building an engine.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        skeleton = cls._from_config(config, attn_implementation=ATTENTION, **options)
    assert isinstance(skeleton, nn.Module)
    return skeleton


def _check_names(skeleton: nn.Module, named: dict[str, Source], cls: type) -> None:
    persistent: dict[str, Tensor] = {**dict(skeleton.named_parameters(remove_duplicate=False))}
    persistent |= persistent_buffers(skeleton)
    problems = [f"{name}: the learner has none" for name in persistent if name not in named]
    problems += [f"{name}: {cls.__name__} has none" for name in named if name not in persistent]
    for name, tensor in persistent.items():
        if name in named and named[name].shape != tensor.shape:
            problems.append(f"{name}: {list(named[name].shape)}, by its config {list(tensor.shape)}")
    if problems:
        raise ValueError(
            f"the learner's tensors aren't those of {cls.__name__} with its config, so it can't be run by the engine: "
            + "; ".join(problems[:20])
        )


def _fill(
    skeleton: nn.Module,
    named: dict[str, Source],
    device: torch.device,
    dtype: torch.dtype,
    allocate: Allocate | None,
) -> dict[str, weakref.ref[Tensor]]:
    """Gives every persistent tensor its storage, and a value where it is the engine's own; returns the shared."""
    buffers = persistent_buffers(skeleton)
    keep_float32 = _float32_pattern(skeleton, dtype)
    float32_head = _float32_head(skeleton, named)
    tensors: dict[int, Tensor] = {}
    origins: dict[str, weakref.ref[Tensor]] = {}
    own: list[tuple[Source, torch.dtype]] = []
    for name, source in distinct(named).items():
        wide = keep_float32(name) or source is float32_head
        wanted = source.dtype if name in buffers else torch.float32 if wide else dtype
        if source.owner is not None and source.device == device and source.dtype == wanted:
            tensors[id(source)] = source.owner.detach()
            origins[name] = weakref.ref(source.owner)
        else:
            own.append((source, wanted))
    own.sort(key=lambda item: len(item[0].shape) < 2)  # matrices first: so q, k and v lie behind one another
    specs = [(source.shape, wanted) for source, wanted in own]
    made = allocate(specs) if allocate else [torch.empty(shape, dtype=wanted, device=device) for shape, wanted in specs]
    copies = [(tensor, source) for tensor, (source, _) in zip(made, own, strict=True)]
    write(copies)
    tensors |= {id(source): tensor for tensor, source in copies}
    # Tied names lead to one source, so they become one parameter again, whatever the config says about tying.
    parameters = {
        id(source): nn.Parameter(tensors[id(source)], requires_grad=False)
        for name, source in distinct(named).items()
        if name not in buffers
    }
    for name, source in named.items():
        owner, attribute = _owner(skeleton, name)
        if name in buffers:
            owner._buffers[attribute] = tensors[id(source)]
        else:
            owner._parameters[attribute] = parameters[id(source)]
    return origins


def _copy_buffers(skeleton: nn.Module, learner: nn.Module, device: torch.device) -> None:
    theirs = non_persistent_buffers(learner)
    persistent = persistent_buffers(skeleton)
    for name, buffer in list(skeleton.named_buffers(remove_duplicate=False)):
        if name in persistent:
            continue
        if name not in theirs or theirs[name].shape != buffer.shape:
            raise ValueError(f"the learner's buffer {name} isn't that of a fresh {type(skeleton).__name__}: rebuild it")
        owner, attribute = _owner(skeleton, name)
        owner._buffers[attribute] = theirs[name].detach().to(device, copy=True)
    modules = dict(unwrap(learner).named_modules())
    for name, module in skeleton.named_modules():
        for attribute, value in vars(module).items():
            # Some classes keep a second reference to a buffer as a plain attribute.
            if isinstance(value, Tensor) and value.is_meta:
                original = getattr(modules.get(name), attribute, None)
                if not isinstance(original, Tensor):
                    raise ValueError(f"the learner's {name} has no tensor {attribute}, as a fresh one has: rebuild it")
                setattr(module, attribute, original.detach().to(device, copy=True))


def _float32_pattern(skeleton: Any, dtype: torch.dtype) -> Any:
    """Which names the class keeps in float32 (routers), by the rule that from_pretrained follows."""
    parts = set(getattr(skeleton, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        parts |= set(getattr(skeleton, "_keep_in_fp32_modules", None) or ())
    patterns = [re.compile(rf"(^|\.){re.escape(part)}($|\.)") for part in parts]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _float32_head(skeleton: Any, named: Mapping[str, Source]) -> Source | None:
    """The output layer's weight, if the learner keeps that in float32 and computes the rest in less."""
    head = skeleton.get_output_embeddings()
    source = next((named.get(f"{name}.weight") for name, module in skeleton.named_modules() if module is head), None)
    kept = source is not None and source.dtype == torch.float32 and body_dtype(named) != torch.float32
    return source if kept else None


def _cast_around_head(skeleton: Any, dtype: torch.dtype) -> None:
    """Where the head is wider than `dtype`: casts what goes into it, and what comes out of an embedding tied to it.

    What the learner has for that (hooks, a forward of its own) isn't copied.
    """
    head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dtype == dtype:
        return
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype), *inputs[1:]))
    if embedding.weight is weight:
        embedding.register_forward_hook(lambda module, inputs, output: output.to(dtype))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _indexed(device: torch.device) -> torch.device:
    bare = device.type == "cuda" and str(device) == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if bare else device
