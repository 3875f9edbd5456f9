"""Projections that read the same input, laid behind one another, so that one matrix product computes them all.

q, k and v come to lie in one buffer, and gate and up in another; the module's own parameters, and the learner's where
they are shared, become pieces of it. They stay the same Parameter objects with the same values, so an optimiser's
in-place steps, `load_state_dict` and saving go on as before. `module.to(...)` gives the learner other storage again;
the next exchange notices and copies.

Each piece is a storage of its own over the buffer's memory: what saves models takes tensors of one storage for one
tensor, and would leave all but one out. So whoever wants the whole asks here, where it is known which buffer a
parameter was moved into.

A parameter is moved only if its storage is its own: views of a flat buffer (DeepSpeed's ZeRO) belong to somebody, and
stay where they are. Whatever isn't joined is computed in products of its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakTensorKeyDictionary

_buffers = WeakTensorKeyDictionary()
"""Of each parameter that was moved, a weak reference to its buffer, which the modules that are run keep."""


def joined(tensors: list[Tensor]) -> Tensor | None:
    """The tensors [n, ...] as one [sum of n, ...], if they lie behind one another in a storage or buffer; else None."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        alike = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:]
        if not (alike and tensor.is_contiguous() and tensor.data_ptr() == end):
            return None
        end += tensor.nbytes
    length = sum(t.shape[0] for t in tensors)
    if len({t.untyped_storage().data_ptr() for t in tensors}) == 1:
        return first.detach().as_strided((length, *first.shape[1:]), first.stride(), first.storage_offset())
    buffer = _common_buffer(tensors)
    if buffer is None or not buffer.data_ptr() <= first.data_ptr() < end <= buffer.data_ptr() + buffer.nbytes:
        return None
    start = (first.data_ptr() - buffer.data_ptr()) // (first.nbytes // first.shape[0])
    return buffer[start : start + length]


@torch.no_grad()
def join_projections(module: nn.Module) -> int:
    """Joins q, k, v and gate, up in every layer of a dense decoder that `build_module` made.

    Returns:
        How many groups lie behind one another afterwards.
    """
    origins: dict[str, Any] = module.__dict__.get("_rollout_origins", {})
    kept: list[Tensor] = module.__dict__.setdefault("_rollout_buffers", [])
    done = 0
    for names in _groups(module):
        parameters: list[Tensor] = [module.get_parameter(name) for name in names]
        owners = [origins[name]() if name in origins else None for name in names]
        buffer, shared = None, [owner for owner in owners if owner is not None]
        if len(shared) == len(owners) and joined(shared) is not None:
            buffer = _common_buffer(shared)  # another engine of this learner has moved them
        elif joined(parameters) is None and _movable(parameters, owners):
            buffer = _move(parameters, owners)
        if buffer is not None:
            kept.append(buffer)
            for parameter in parameters:
                _buffers[parameter] = weakref.ref(buffer)
        done += joined(parameters) is not None
    return done


def _common_buffer(tensors: list[Any]) -> Tensor | None:
    """The buffer that all of them were moved into, if a module still keeps it."""
    found = {id(b): b for b in (_buffers[t]() if t in _buffers else None for t in tensors)}
    return next(iter(found.values())) if len(found) == 1 else None


def _groups(module: nn.Module) -> list[list[str]]:
    groups = []
    for index in range(len(module.model.layers)):  # type: ignore[arg-type, union-attr]
        layer = f"model.layers.{index}"
        groups.append([f"{layer}.self_attn.{name}_proj.weight" for name in "qkv"])
        groups.append([f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")])
    return groups


def _movable(parameters: list[Tensor], owners: list[Any]) -> bool:
    """Each alone in its storage, and all of them the learner's or none."""
    alone = all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    plain = all(type(owner) in (nn.Parameter, Tensor) for owner in owners)
    return alone and (plain or all(owner is None for owner in owners))


def _move(parameters: list[Tensor], owners: list[Any]) -> Tensor:
    buffer = torch.cat([p.detach() for p in parameters])
    pieces = buffer.split([p.shape[0] for p in parameters])
    for parameter, owner, piece in zip(parameters, owners, pieces, strict=True):
        parameter.data = from_dlpack(piece)  # a storage of its own, which keeps the buffer's memory
        if owner is not None:
            owner.data = parameter.data
            _buffers[owner] = weakref.ref(buffer)
    return buffer
