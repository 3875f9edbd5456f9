"""Carry-over: how a token sampled in one batch becomes an input of the next before the host has seen it.

`plan` decides on the host, from rows alone; `apply` runs on the device, at the head of a decode graph.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rollout.engine.kv_cache import IntArray


def plan(rows: IntArray, previous_rows: IntArray | None, num_rows: int) -> IntArray:
    """The carry-over mask: for each of `rows`, where its token will stand in the batch in flight.

    Args:
        rows: int32 [rows], the rows of the batch being filled.
        previous_rows: the rows of the batch in flight whose samples count, -1 where one doesn't; None: nothing flies.
        num_rows: rows there can be.

    Returns:
        int32 [rows]: an index into the batch in flight, or -1 for a row whose last token the host knows.
    """
    if previous_rows is None:
        return np.full(rows.size, -1, np.int32)
    place = np.full(num_rows + 1, -1, np.int32)  # [num_rows + 1]; the last entry takes what doesn't count
    place[previous_rows] = np.arange(previous_rows.size, dtype=np.int32)
    place[num_rows] = -1
    return place[rows]


def apply(token_ids: Tensor, carry: Tensor, previous_tokens: Tensor) -> Tensor:
    """Adds the carried tokens to the input ids, whose placeholders are 0.

    Args:
        token_ids: int32 [rows], 0 where a token is carried.
        carry: int32 [rows], index into `previous_tokens`, or -1.
        previous_tokens: int32 [max_rows], what the batch before sampled.

    Returns:
        int32 [rows], the input ids.
    """
    carried = previous_tokens.index_select(0, carry.clamp(min=0))  # [rows]
    return token_ids + carried.masked_fill(carry < 0, 0)
