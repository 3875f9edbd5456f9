"""Owns the comparison of a learner's tensors with an engine's: names, shapes, kinds. It reads no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

NAMED = 20  # how many tensors an error lists


class Described(Protocol):
    """What is compared: a tensor, a `Source` or a `Spec`."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Spec(NamedTuple):
    """A tensor of another process."""

    shape: torch.Size
    dtype: torch.dtype


def describe(tensors: Mapping[str, Described]) -> dict[str, Spec]:
    """The same names, without the tensors."""
    return {name: Spec(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def differences(targets: Mapping[str, Described], named: Mapping[str, Described]) -> str:
    """What keeps the learner's tensors `named` from going into the engine's `targets`; "" if nothing does.

    Dtypes may differ where both are floating point, or neither is.
    """
    missing = [name for name in targets if name not in named]
    extra = [name for name in named if name not in targets]
    misshapen = []
    for name, target in targets.items():
        theirs = named.get(name)
        if theirs is None:
            continue
        alike = theirs.dtype == target.dtype or theirs.dtype.is_floating_point == target.dtype.is_floating_point
        if theirs.shape != target.shape or not alike:
            misshapen.append(
                f"{name} ({list(theirs.shape)} {theirs.dtype}, the engine has {list(target.shape)} {target.dtype})"
            )
    return "; ".join(
        f"{what}: {', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}"
        for what, names in (("missing", missing), ("extra", extra), ("of another shape", misshapen))
        if names
    )


def check(targets: Mapping[str, Described], named: Mapping[str, Described]) -> None:
    """Raises ValueError, naming what differs, unless every tensor has its counterpart."""
    if problems := differences(targets, named):
        raise ValueError(
            f"the learner's tensors aren't those that the engine was built with; {problems}. "
            "Nothing was written. If the model was changed on purpose (resized, tied, adapted), make a new worker"
        )
