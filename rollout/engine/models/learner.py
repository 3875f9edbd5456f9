"""Owns the view of a learner as plain named tensors: unwrapping, and where each tensor's value comes from.

A learner may be wrapped (DDP, torch.compile, PEFT) or sharded (FSDP1, FSDP2, ZeRO-3); here it becomes a dict from the
plain Hugging Face names to `Source`s. Reading a source never changes the learner. Refuses LoRA within FSDP1 and
adapters other than LoRA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout.engine.models import fsdp1, lora, zero3

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


class _Leaf(NamedTuple):
    name: str
    owner: Tensor | fsdp1.Shard
    adapters: tuple[nn.Module, ...]  # the LoRA layers whose deltas belong to it
    is_parameter: bool
    persistent: bool

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for tied weights."""
        owner = self.owner.key if isinstance(self.owner, fsdp1.Shard) else (id(self.owner),)
        return (*owner, *(id(layer) for layer in self.adapters))


def unwrap(learner: nn.Module) -> nn.Module:
    """The model inside of DDP, FSDP1, torch.compile, DeepSpeed's engine and PEFT, in any nesting.

    Raises ValueError for PEFT methods whose weights can't be merged (prompt tuning and the like).
    """
    return _unwrap(learner)[0]


def _unwrap(learner: nn.Module) -> tuple[nn.Module, fsdp1.Shards, nn.Module | None]:
    """The model inside, the parameters that FSDP1 modules around it shard, and the outermost of these."""
    shards: fsdp1.Shards = {}
    root: nn.Module | None = None
    inner: object
    while True:
        if _is_a(learner, "FullyShardedDataParallel"):
            root = root or learner
            fsdp1.add_shards(learner, shards, root)
            inner = learner.module
        elif _is_a(learner, "OptimizedModule"):
            inner = learner._orig_mod
        elif _is_a(learner, "PeftModel", "PeftMixedModel"):
            lora.check_config(learner)
            inner = learner.get_base_model()  # type: ignore[operator]
        elif _is_a(learner, "DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            inner = learner.module
        elif not isinstance(learner, nn.Module):
            raise ValueError(f"the learner is a {type(learner).__name__}, not a module: pass the model")
        else:
            return learner, shards, root
        assert isinstance(inner, nn.Module)
        learner = inner


def sources(learner: nn.Module) -> dict[str, Source]:
    """Every parameter and persistent buffer under its plain name; tied names lead to one and the same `Source`.

    Only metadata is looked at. Raises ValueError for learners that can't be read (see the module's docstring).
    """
    found: dict[str, Source] = {}
    seen: dict[tuple[object, ...], Source] = {}
    for leaf in _leaves(learner):
        if not leaf.persistent:
            continue
        identity = leaf.identity
        if identity not in seen:
            seen[identity] = _source(leaf)
        found[leaf.name] = seen[identity]
    return found


def non_persistent_buffers(learner: nn.Module) -> dict[str, Tensor]:
    """The learner's buffers that no state dict holds (rotary frequencies), under their plain names."""
    return {
        leaf.name: leaf.owner
        for leaf in _leaves(learner)
        if not leaf.persistent and not isinstance(leaf.owner, fsdp1.Shard)
    }


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a plain module that its state dict holds."""
    found: dict[str, Tensor] = {}
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a plain module, each under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and name not in module._non_persistent_buffers_set:
                seen.add(id(buffer))
                found[prefix + name] = buffer
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{prefix}{name}.")

    walk(module, "")
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
    copy_pairs(ready)
    chunk: list[tuple[Tensor, Tensor]] = []
    chunk_bytes = 0
    failure: Exception | None = None
    for target, source in pairs:
        if source.owner is not None:
            continue
        try:  # after an error the rest is read all the same, for other ranks gather what this one must too
            value = source.read()
            if failure is None:
                chunk.append((target, value))
                chunk_bytes += value.nbytes
                if chunk_bytes >= CHUNK_BYTES:
                    copy_pairs(chunk)
                    chunk, chunk_bytes = [], 0
        except Exception as error:
            failure, chunk = failure or error, []
    if failure is not None:
        raise failure
    copy_pairs(chunk)
    return sum(target.nbytes for target, _ in pairs)


def copy_pairs(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies (target, value) pairs, fused where they are alike, on the current stream. Call it without autograd."""
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
    if isinstance(tensor, fsdp1.Shard):
        if leaf.adapters:
            raise ValueError(
                f"{leaf.name} is adapted by LoRA within FSDP1 (FullyShardedDataParallel), which isn't supported: shard "
                "with FSDP2 (torch.distributed.fsdp.fully_shard), or train with DDP"
            )
        return Source(tensor.shape, tensor.dtype, tensor.device, True, None, tensor.read)
    if zero3.is_partitioned(tensor):
        shape = zero3.whole_shape(tensor)
        return Source(shape, tensor.dtype, tensor.device, leaf.is_parameter, None, lambda: _read_zero3(tensor, leaf))

    def read() -> Tensor:
        whole = lora.whole(tensor.detach())
        return lora.merge(whole, leaf.name.rpartition(".")[2], leaf.adapters) if leaf.adapters else whole

    own = not leaf.adapters and not lora.is_sharded(tensor)
    return Source(tensor.shape, tensor.dtype, tensor.device, leaf.is_parameter, tensor if own else None, read)


def _read_zero3(tensor: Tensor, leaf: _Leaf) -> Tensor:
    with torch.no_grad(), zero3.gathered(tensor, leaf.adapters):
        whole = tensor.detach()
        return lora.merge(whole, leaf.name.rpartition(".")[2], leaf.adapters) if leaf.adapters else whole.clone()


def _leaves(learner: nn.Module) -> list[_Leaf]:
    model, shards, root = _unwrap(learner)
    found: list[_Leaf] = []
    _walk(model, "", {}, shards, root, found)
    return found


def _walk(
    module: nn.Module,
    prefix: str,
    adapted: Mapping[str, tuple[nn.Module, ...]],
    shards: fsdp1.Shards,
    root: nn.Module | None,
    found: list[_Leaf],
) -> None:
    """Follows the modules as the learner's forward does: through wrappers, to the copy that is in use."""
    cls: Any = type(module)
    kind = _wrapper(cls)
    if kind == "fsdp1":
        root = root or module
        fsdp1.add_shards(module, shards, root)
        return _walk(_child(module, "module"), prefix, adapted, shards, root, found)
    if kind is not None:
        return _walk(_child(module, kind), prefix, adapted, shards, root, found)
    if "peft" in sys.modules and lora.adapts(cls):
        if (saved := lora.module_in_use(module, prefix)) is not None:
            return _walk(saved, prefix, adapted, shards, root, found)
        if (base := lora.base_layer(module, prefix)) is not None:
            return _walk(base[0], prefix, base[1], shards, root, found)
    sharded = shards.get(id(module), {})
    for name, shard in sharded.items():
        found.append(_Leaf(prefix + name, shard, adapted.get(name, ()), True, True))
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in sharded and name != fsdp1.FLAT:
            found.append(_Leaf(prefix + name, parameter, adapted.get(name, ()), True, True))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            found.append(_Leaf(prefix + name, buffer, (), False, name not in module._non_persistent_buffers_set))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}{name}.", {}, shards, root, found)


@lru_cache(maxsize=1024)
def _wrapper(cls: type) -> str | None:
    """What a module of this class is inside of a model: "fsdp1", the attribute that holds what it wraps, or None."""
    names = {base.__name__ for base in cls.__mro__}
    if "FullyShardedDataParallel" in names:
        return "fsdp1"
    if "OptimizedModule" in names:
        return "_orig_mod"
    return "_checkpoint_wrapped_module" if names & {"CheckpointWrapper", "OffloadWrapper"} else None


def _child(module: nn.Module, name: str) -> nn.Module:
    child = getattr(module, name)
    assert isinstance(child, nn.Module)
    return child


def _is_a(module: nn.Module, *names: str) -> bool:
    # By name: none of these libraries has to be installed for a learner to be something else.
    return any(cls.__name__ in names for cls in type(module).__mro__)
