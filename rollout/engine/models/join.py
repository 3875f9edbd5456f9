"""Projections that read the same input, laid behind one another, so that one matrix product computes them all.

q, k and v become one buffer, and gate and up another; the module's own parameters, and the learner's where they are
shared, become views of it. They stay the same Parameter objects with the same values, so an optimiser's in-place steps,
`load_state_dict` and `save_pretrained` go on as before. `module.to(...)` gives the learner other storage again; the
next exchange notices and copies.

A parameter is moved only if its storage is its own: views of a flat buffer (DeepSpeed's ZeRO) belong to somebody, and
stay where they are. Whatever isn't joined is computed in products of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def joined(tensors: list[Tensor]) -> Tensor | None:
    """The tensors [n, ...] as one [sum of n, ...], if they lie behind one another in one storage; else None."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        alike = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:]
        if not (same and alike and tensor.is_contiguous() and tensor.data_ptr() == end):
            return None
        end += tensor.nbytes
    size = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return first.detach().as_strided(size, first.stride(), first.storage_offset())


@torch.no_grad()
def join_projections(module: nn.Module) -> int:
    """Joins q, k, v and gate, up in every layer of a dense decoder that `build_module` made.

    Returns:
        How many groups lie behind one another afterwards.
    """
    origins: dict[str, Any] = module.__dict__.get("_rollout_origins", {})
    done = 0
    for names in _groups(module):
        parameters = [module.get_parameter(name) for name in names]
        owners = [origins[name]() if name in origins else None for name in names]
        if joined(list(parameters)) is None and _movable(parameters, owners):
            _move(parameters, owners)
        done += joined(list(parameters)) is not None
    return done


def _groups(module: nn.Module) -> list[list[str]]:
    groups = []
    for index in range(len(module.model.layers)):  # type: ignore[arg-type, union-attr]
        layer = f"model.layers.{index}"
        groups.append([f"{layer}.self_attn.{name}_proj.weight" for name in "qkv"])
        groups.append([f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")])
    return groups


def _movable(parameters: list[nn.Parameter], owners: list[Any]) -> bool:
    """Each alone in its storage, and all of them the learner's or none."""
    alone = all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    plain = all(type(owner) in (nn.Parameter, Tensor) for owner in owners)
    return alone and (plain or all(owner is None for owner in owners))


def _move(parameters: list[nn.Parameter], owners: list[Any]) -> None:
    buffer = torch.cat([p.detach() for p in parameters])
    pieces = buffer.split([p.shape[0] for p in parameters])
    for parameter, owner, piece in zip(parameters, owners, pieces, strict=True):
        parameter.data = piece
        if owner is not None:
            owner.data = piece
