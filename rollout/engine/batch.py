"""`Batch`: one step's work as host arrays, made by the scheduler and read by slots, runner and scheduler again.

Two kinds. A *decode* batch holds one token for each row and is replayed from a CUDA graph. A *prefill* batch holds
chunks of prompts, ragged, and runs eagerly, or, where it is small, padded from a graph. Both give one sampled token for
each entry of `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

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


class PrefillSize(NamedTuple):
    """What a prefill batch is padded to, for a graph knows no other size."""

    tokens: int
    rows: int
    """Sequences that give a sample. There is one more, which holds the tokens of padding."""
    blocks: int
    """Block numbers of each sequence."""


def pad_prefill(batch: Batch, size: PrefillSize, scratch_row: int) -> Batch:
    """`batch` padded to `size`, for the device only: its samples are still those of the first rows.

    Sequences that lack are of the scratch row and have no tokens; behind them, one of the scratch row has all tokens of
    padding, each at position 0.
    """
    assert batch.prefill is not None
    rows, tokens = batch.rows.size, batch.token_ids.size
    query_start = np.full(size.rows + 2, tokens, np.int32)
    query_start[: rows + 1] = batch.prefill.query_start
    query_start[-1] = size.tokens
    tables = np.zeros((size.rows, size.blocks), np.int32)
    tables[:rows, : batch.prefill.tables.shape[1]] = batch.prefill.tables
    row_state = np.zeros((size.rows, len(ROW_STATE_FIELDS)), np.int32)
    row_state[:rows] = batch.prefill.row_state
    return replace(
        batch,
        rows=_extend(batch.rows, size.rows + 1, scratch_row),
        token_ids=_extend(batch.token_ids, size.tokens, 0),
        position=_extend(batch.position, size.tokens, 0),
        token_row=_extend(batch.token_row, size.tokens, scratch_row),
        prefill=replace(batch.prefill, query_start=query_start, tables=tables, row_state=row_state),
    )


def _extend(values: IntArray, size: int, padding: int) -> IntArray:
    extended = np.full(size, padding, np.int32)
    extended[: values.size] = values
    return extended
