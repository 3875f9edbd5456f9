"""Owns the reading of FSDP1 (FullyShardedDataParallel): parameters gathered one wrapped unit at a time.

A unit is what FSDP wrapped: usually a layer, and the outermost with what no layer holds. Reading is a collective, so
all ranks read the same parameters in the same order; the learner is sharded again after each unit. At most one unit
is gathered at once; copies of what it holds are kept until each has been asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLAT = "_flat_param"
"""The name under which a module that FSDP wrapped holds the flattened parameters, unless use_orig_params is set."""

Shards = dict[int, dict[str, "Shard"]]
"""By the id of the module whose parameters they are, and their names in it."""


@dataclass(frozen=True)
class Shard:
    """A parameter of which this process holds a part, or nothing."""

    unit: _Unit
    key: tuple[int, str]  # id of the module and name under which the unit holds it; of tied ones, the first
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def read(self) -> Tensor:
        """The whole parameter, a new tensor. Every rank has to do this at the same point."""
        return self.unit.read(self.key)


class _Unit:
    def __init__(self, module: Any, root: Any) -> None:
        self._module = module
        self._root = root  # the outermost FSDP module around it
        self._kept: dict[tuple[int, str], Tensor | Exception] = {}

    @torch.no_grad()
    def read(self, key: tuple[int, str]) -> Tensor:
        if key not in self._kept:
            try:
                self._kept = dict(self._gather())
            except Exception as error:  # of each of them: to gather once more would be to gather alone
                infos = self._module._handle.flat_param._param_infos
                self._kept = {(id(info.module), info.param_name): error for info in infos}
        value = self._kept.pop(key)
        if isinstance(value, Exception):
            raise value
        return value

    def _gather(self) -> dict[tuple[int, str], Tensor]:
        summon = type(self._module).summon_full_params
        if self._root._is_root is None:
            # NOTE: whatever FSDP sees first before training, it takes for the outermost for good.
            with summon(self._root, recurse=False, writeback=False):
                pass
        with summon(self._module, recurse=False, writeback=False):
            infos = self._module._handle.flat_param._param_infos
            return {
                (id(info.module), info.param_name): getattr(info.module, info.param_name).detach().clone()
                for info in infos
            }


def add_shards(module: Any, shards: Shards, root: Any) -> None:
    """Notes the parameters that the FSDP module `module` itself shards, not those of FSDP modules within."""
    handle = module._handle
    if handle is None:  # all its parameters are sharded further in
        return
    flat = handle.flat_param
    unit = _Unit(module, root)
    for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
        shard = Shard(unit, (id(info.module), info.param_name), shape, flat.dtype, flat.device)
        shards.setdefault(id(info.module), {})[info.param_name] = shard
    for tied in flat._shared_param_infos:
        first = shards[id(tied.prim_module)][tied.prim_param_name]
        shards.setdefault(id(tied.module), {})[tied.param_name] = first
