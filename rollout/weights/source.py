"""Owns the public reading of a learner's weights by name. How wrappers and LoRA are seen through: `engine.models`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rollout.engine.models.learner import distinct, sources


def named_weights(learner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter and persistent buffer of the learner by its plain Hugging Face name.

    Tied weights come once, under their first name. What the learner holds as it is comes as an alias of its storage,
    not to be written; LoRA-adapted tensors are merged, and FSDP2 and ZeRO-3 shards gathered, one at a time as they are
    asked for; of FSDP1, one wrapped unit at a time. Gathering is a collective: every rank has to read to the end.

    Raises ValueError for learners whose weights can't be read: LoRA within FSDP1, adapters other than LoRA.
    """
    for name, source in distinct(sources(learner)).items():
        with torch.no_grad():
            value = source.read()
        yield name, value
