"""Owns the view of a learner as plain named tensors: unwrapping, and where each tensor's value comes from.

A learner may be wrapped (DDP, torch.compile, PEFT) or sharded (FSDP2); here it becomes a dict from the plain Hugging
Face names to `Source`s. Reading a source never changes the learner. Refuses FSDP1, ZeRO-3 and adapters other than LoRA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.engine.models import lora

CHUNK_BYTES = 256 << 20  # merged or gathered tensors that may exist at once, besides the one being made


@dataclass(frozen=True, eq=False)
class Source:
    """One tensor of the learner, by what is known of it without reading it.

    `owner` is the learner's own tensor where its storage holds the value as it is. None where the value has to be made
    (LoRA merged, shards gathered); then `read` makes a new tensor, and nothing may be shared.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_parameter: bool
    owner: Tensor | None
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class _Leaf:
    name: str
    owner: Tensor
    adapters: tuple[nn.Module, ...]  # the LoRA layers whose deltas belong to it
    is_parameter: bool
    persistent: bool


def unwrap(learner: nn.Module) -> nn.Module:
    """The model inside of DDP, torch.compile, DeepSpeed's engine and PEFT, in any nesting.

    Raises ValueError for FSDP1, and for PEFT methods whose weights can't be merged (prompt tuning and the like).
    """
    while True:
        if _is_a(learner, "FullyShardedDataParallel"):
            raise ValueError(_FSDP1)
        if _is_a(learner, "OptimizedModule"):
            inner = learner._orig_mod
        elif _is_a(learner, "PeftModel", "PeftMixedModel"):
            lora.check_config(learner)
            inner = learner.get_base_model()  # type: ignore[operator]
        elif _is_a(learner, "DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            inner = learner.module
        elif not isinstance(learner, nn.Module):
            raise ValueError(f"the learner is a {type(learner).__name__}, not a module: pass the model")
        else:
            return learner
        assert isinstance(inner, nn.Module)
        learner = inner


def sources(learner: nn.Module) -> dict[str, Source]:
    """Every parameter and persistent buffer under its plain name; tied names lead to one and the same `Source`.

    Only metadata is looked at. Raises ValueError for learners that can't be read (see the module's docstring).
    """
    found: dict[str, Source] = {}
    seen: dict[tuple[int, ...], Source] = {}
    for leaf in _leaves(unwrap(learner), "", {}):
        if not leaf.persistent:
            continue
        identity = (id(leaf.owner), *(id(layer) for layer in leaf.adapters))
        if identity not in seen:
            seen[identity] = _source(leaf)
        found[leaf.name] = seen[identity]
    return found


def non_persistent_buffers(learner: nn.Module) -> dict[str, Tensor]:
    """The learner's buffers that no state dict holds (rotary frequencies), under their plain names."""
    return {leaf.name: leaf.owner for leaf in _leaves(unwrap(learner), "", {}) if not leaf.persistent}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a plain module that its state dict holds."""
    found: dict[str, Tensor] = {}
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def distinct(named: Mapping[str, Source]) -> dict[str, Source]:
    """`named` with each source under its first name only, as `named_parameters()` lists tied weights."""
    first: dict[int, str] = {}
    for name, source in named.items():
        first.setdefault(id(source), name)
    return {name: named[name] for name in first.values()}


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` are the same elements of the same memory."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


@torch.no_grad()
def write(pairs: list[tuple[Tensor, Source]]) -> int:
    """Copies each source into its target, in place, on the current stream; returns the bytes written.

    Conversions (float32 to bfloat16) are fused, one pass for each pair of dtypes. Made tensors are written in chunks of
    `CHUNK_BYTES`, so that a second whole model never exists. Shapes were checked by the caller.
    """
    ready: list[tuple[Tensor, Tensor]] = [(t, s.owner.detach()) for t, s in pairs if s.owner is not None]
    _copy(ready)
    chunk: list[tuple[Tensor, Tensor]] = []
    chunk_bytes = 0
    for target, source in pairs:
        if source.owner is not None:
            continue
        value = source.read()
        chunk.append((target, value))
        chunk_bytes += value.nbytes
        if chunk_bytes >= CHUNK_BYTES:
            _copy(chunk)
            chunk, chunk_bytes = [], 0
    _copy(chunk)
    return sum(target.nbytes for target, _ in pairs)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    # One odd pair sends a whole _foreach_copy_ down the slow path, so only like pairs travel together.
    groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in pairs:
        alike = target.stride() == value.stride()
        targets, values = groups.setdefault((target.dtype, value.dtype, value.device, alike), ([], []))
        targets.append(target)
        values.append(value)
    for targets, values in groups.values():
        torch._foreach_copy_(targets, values, non_blocking=True)


def _source(leaf: _Leaf) -> Source:
    tensor = leaf.owner
    if hasattr(tensor, "ds_id"):
        raise ValueError(
            "the learner's parameters are partitioned by DeepSpeed ZeRO-3, which isn't supported yet: "
            "train with ZeRO-2 or FSDP2"
        )

    def read() -> Tensor:
        whole = lora.whole(tensor.detach())
        return lora.merge(whole, leaf.name.rpartition(".")[2], leaf.adapters) if leaf.adapters else whole

    own = not leaf.adapters and not lora.is_sharded(tensor)
    return Source(tensor.shape, tensor.dtype, tensor.device, leaf.is_parameter, tensor if own else None, read)


def _leaves(module: nn.Module, prefix: str, adapted: Mapping[str, tuple[nn.Module, ...]]) -> Iterator[_Leaf]:
    """Walks the modules as the learner's forward does: through wrappers, to the copy that is in use."""
    if _is_a(module, "FullyShardedDataParallel"):
        raise ValueError(_FSDP1)
    if _is_a(module, "OptimizedModule"):
        yield from _leaves(_child(module, "_orig_mod"), prefix, adapted)
        return
    if _is_a(module, "CheckpointWrapper", "OffloadWrapper"):
        yield from _leaves(_child(module, "_checkpoint_wrapped_module"), prefix, adapted)
        return
    if "peft" in sys.modules:
        if (saved := lora.module_in_use(module, prefix)) is not None:
            yield from _leaves(saved, prefix, adapted)
            return
        if (base := lora.base_layer(module, prefix)) is not None:
            yield from _leaves(base[0], prefix, base[1])
            return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield _Leaf(prefix + name, parameter, adapted.get(name, ()), is_parameter=True, persistent=True)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            persistent = name not in module._non_persistent_buffers_set
            yield _Leaf(prefix + name, buffer, (), is_parameter=False, persistent=persistent)
    for name, child in module._modules.items():
        if child is not None:
            yield from _leaves(child, f"{prefix}{name}.", {})


def _child(module: nn.Module, name: str) -> nn.Module:
    child = getattr(module, name)
    assert isinstance(child, nn.Module)
    return child


def _is_a(module: nn.Module, *names: str) -> bool:
    # By name: none of these libraries has to be installed for a learner to be something else.
    return any(cls.__name__ in names for cls in type(module).__mro__)


_FSDP1 = (
    "the learner is wrapped in FSDP1 (FullyShardedDataParallel), which isn't supported yet: "
    "shard it with FSDP2 (torch.distributed.fsdp.fully_shard), or train with DDP"
)
