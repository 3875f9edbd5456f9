"""`Batch`: one step's work as host arrays, made by the scheduler and read by slots, runner and scheduler again.

Two kinds. A *decode* batch holds one token for each row and is replayed from a CUDA graph. A *prefill* batch holds
chunks of prompts, ragged, and runs eagerly. Both give one sampled token for each entry of `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.engine.kv_cache import IntArray

ROW_STATE_FIELDS = ("temperature", "key0", "key1", "top_k", "top_p", "min_p")
"""What the device keeps of a row's sampling parameters, in order; floats as their bits."""


@dataclass(slots=True)
class Prefill:
    """What only a prefill batch has. `seqs` is the length of the batch's `rows`."""

    query_start: IntArray  # [seqs + 1], where each sequence's tokens begin
    tables: IntArray  # [seqs, blocks], block numbers of each sequence from its first position
    row_state: IntArray  # [seqs, len(ROW_STATE_FIELDS)]
    complete: npt.NDArray[np.bool_]  # [seqs], whether the chunk ends its prompt, so that its sample counts


@dataclass(slots=True)
class Batch:
    """One step. Token arrays are [tokens]; for a decode batch tokens = rows."""

    rows: IntArray  # [rows], the row each sampled token belongs to
    epochs: IntArray  # [rows], the rows' epochs when this was scheduled: a row that changed hands drops its token
    token_ids: IntArray  # [tokens], 0 where the token comes by carry-over
    position: IntArray  # [tokens]
    token_row: IntArray  # [tokens]
    carry: IntArray  # [rows] for decode, else empty: index into the batch before's output, or -1
    new_block: IntArray  # [rows] for decode, else empty: the block that holds `position` from now on, or -1
    filtered: bool = False
    prefill: Prefill | None = None
    step: int = -1

    @property
    def kind(self) -> str:
        """ "prefill" or "decode"."""
        return "decode" if self.prefill is None else "prefill"
