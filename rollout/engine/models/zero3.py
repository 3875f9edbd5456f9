"""Owns the reading of DeepSpeed's ZeRO-3: parameters gathered for the time of one read, then partitioned again.

Gathering is a collective, so all ranks read the same parameters in the same order. DeepSpeed is taken from where the
learner has it; without it nothing here is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


def is_partitioned(tensor: Tensor) -> bool:
    """Whether this process holds `tensor` in part only, by ZeRO-3."""
    return hasattr(tensor, "ds_id")


def whole_shape(tensor: Any) -> torch.Size:
    """The shape of a partitioned tensor once it is gathered.

    Raises ValueError where DeepSpeed isn't there to gather it.
    """
    if "deepspeed" not in sys.modules:
        raise ValueError(
            "the learner's parameters are partitioned by DeepSpeed ZeRO-3, but deepspeed isn't imported in this "
            "process, so they can't be gathered: pass the model that this process trains"
        )
    return torch.Size(tensor.ds_shape)


def gathered(tensor: Tensor, adapters: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Within it, `tensor` and what the PEFT layers around it add are whole; after it, partitioned as before."""
    added = [
        parameter
        for layer in adapters
        for name, parameter in layer.named_parameters()
        if not name.startswith("base_layer.")
    ]
    context: AbstractContextManager[None] = sys.modules["deepspeed"].zero.GatheredParameters([tensor, *added])
    return context
