"""`Slot`: one set of input and output buffers, on the host (pinned) and on the device, with its events.

All of a step's small inputs lie in one int32 tensor: one copy in. All its outputs lie in another: one copy out. Which
stream copies when is the engine's business; when a buffer may be written again is said here:

- the host's inputs after `h2d_done`, the device's inputs and outputs after `compute_done`, the host's outputs after
  they were read. The engine fills a slot only after `d2h_done`, which comes after both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.engine.batch import ROW_STATE_FIELDS, Batch, Prefill, PrefillSize, pad_prefill
from rollout.engine.kv_cache import IntArray
from rollout.engine.streams import Event, Streams

DECODE_FIELDS = 5
OUTPUT_FIELDS = 3  # token id, logprob and kept mass, the latter two as the bits of a float32


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Device views for a decode step of `rows` rows, each int32 [rows], at addresses that never change."""

    token_ids: Tensor
    position: Tensor
    token_row: Tensor
    carry: Tensor
    new_block: Tensor


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Device views for a prefill step. The first `rows` of its sequences give a sample each, which padding doesn't."""

    token_ids: Tensor  # int32 [tokens]
    position: Tensor  # int32 [tokens]
    token_row: Tensor  # int32 [tokens]
    query_start: Tensor  # int32 [seqs + 1]
    seq_row: Tensor  # int32 [seqs]
    row_state: Tensor  # int32 [rows, fields]
    tables: Tensor  # int32 [rows, blocks]
    max_query_len: int

    @property
    def rows(self) -> int:
        """Sequences that give a sample."""
        return self.row_state.shape[0]


@dataclass(frozen=True, slots=True)
class Outputs:
    """A step's samples on the host."""

    token_ids: IntArray  # [rows]
    logprobs: npt.NDArray[np.float32]  # [rows]
    kept_mass: npt.NDArray[np.float32]  # [rows]


class Slot:
    """Buffers and events of one step in flight."""

    def __init__(
        self,
        index: int,
        *,
        max_rows: int,
        max_prefill_tokens: int,
        max_blocks: int,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self.index = index
        self.max_rows = max_rows
        self.scratch_row = max_rows
        # the last three are query_start's last, and row and query_start of the sequence of padding
        prefill_size = 3 * max_prefill_tokens + max_rows * (2 + len(ROW_STATE_FIELDS) + max_blocks) + 3
        size = max(DECODE_FIELDS * max_rows, prefill_size)
        pin = device.type == "cuda"
        self.host_in = torch.zeros(size, dtype=torch.int32, pin_memory=pin)
        self.device_in = torch.zeros(size, dtype=torch.int32, device=device)
        self.host_out = torch.zeros((OUTPUT_FIELDS, max_rows), dtype=torch.int32, pin_memory=pin)
        self.device_out = torch.zeros((OUTPUT_FIELDS, max_rows), dtype=torch.int32, device=device)
        self._in: IntArray = self.host_in.numpy()
        self._out: IntArray = self.host_out.numpy()
        self.filled = 0  # int32 values of `host_in` that the step needs
        self.h2d_start: Event = streams.event()
        self.h2d_done: Event = streams.event()
        self.compute_start: Event = streams.event(in_graphs=True)
        self.compute_done: Event = streams.event()
        self.d2h_done: Event = streams.event()

    @property
    def out_tokens(self) -> Tensor:
        """int32 [max_rows], on the device: what this slot's step samples, for the next step's carry-over."""
        return self.device_out[0]

    @property
    def bytes(self) -> int:
        """Device memory this slot holds, in bytes."""
        return 4 * (self.device_in.numel() + self.device_out.numel())

    def decode_inputs(self, rows: int) -> DecodeInputs:
        """Device views for `rows` rows."""
        fields = self.device_in[: DECODE_FIELDS * self.max_rows].view(DECODE_FIELDS, self.max_rows)
        return DecodeInputs(*(fields[i, :rows] for i in range(DECODE_FIELDS)))

    def fill_decode(self, batch: Batch, padded_rows: int) -> None:
        """Writes a decode batch to the host's inputs, padded with the scratch row up to `padded_rows`."""
        fields = self._in[: DECODE_FIELDS * self.max_rows].reshape(DECODE_FIELDS, self.max_rows)
        rows = batch.rows.size
        for field, (values, padding) in enumerate(
            (
                (batch.token_ids, 0),
                (batch.position, 0),
                (batch.token_row, self.scratch_row),
                (batch.carry, -1),
                (batch.new_block, -1),
            )
        ):
            fields[field, :rows] = values
            fields[field, rows:padded_rows] = padding
        self.filled = DECODE_FIELDS * self.max_rows

    def pad_device_inputs(self, rows: int) -> None:
        """Makes the device's inputs a decode batch of scratch rows alone, as a capture needs. Synchronises."""
        nothing = np.empty(0, np.int32)
        self.fill_decode(Batch(nothing, nothing, nothing, nothing, nothing, nothing, nothing), rows)
        self.device_in[: self.filled].copy_(self.host_in[: self.filled])

    def fill_prefill(self, batch: Batch, size: PrefillSize | None = None) -> PrefillInputs:
        """Writes a prefill batch to the host's inputs, padded to `size` for a graph.

        Returns:
            The device views where the copy will bring it: of one size, always the same.
        """
        if size is not None:
            batch = pad_prefill(batch, size, self.scratch_row)
        prefill = batch.prefill
        assert prefill is not None
        self.filled = 0
        return PrefillInputs(
            token_ids=self._append(batch.token_ids),
            position=self._append(batch.position),
            token_row=self._append(batch.token_row),
            query_start=self._append(prefill.query_start),
            seq_row=self._append(batch.rows),
            row_state=self._append(prefill.row_state),
            tables=self._append(prefill.tables),
            max_query_len=int(np.diff(prefill.query_start).max()) if size is None else size.tokens,
        )

    def pad_device_prefill(self, size: PrefillSize) -> PrefillInputs:
        """Makes the device's inputs a prefill batch of one token of the scratch row, padded. Synchronises."""
        zero, nothing = np.zeros(1, np.int32), np.empty(0, np.int32)
        row = np.full(1, self.scratch_row, np.int32)
        state, table = np.zeros((1, len(ROW_STATE_FIELDS)), np.int32), np.zeros((1, 1), np.int32)
        prefill = Prefill(np.array([0, 1], np.int32), table, state, np.zeros(1, bool))
        inputs = self.fill_prefill(Batch(row, zero, zero, zero, row, nothing, nothing, prefill=prefill), size)
        self.device_in[: self.filled].copy_(self.host_in[: self.filled])
        return inputs

    def _append(self, values: IntArray) -> Tensor:
        """Adds `values` to the host's inputs. Returns the device view where they will be."""
        start, self.filled = self.filled, self.filled + values.size
        self._in[start : self.filled] = values.reshape(-1)
        return self.device_in[start : self.filled].view(values.shape)

    def copy_in(self) -> None:
        """Enqueues the copy of the inputs to the device, on the current stream."""
        self.device_in[: self.filled].copy_(self.host_in[: self.filled], non_blocking=True)

    def copy_out(self) -> None:
        """Enqueues the copy of the outputs to the host, on the current stream."""
        self.host_out.copy_(self.device_out, non_blocking=True)

    def outputs(self, rows: int) -> Outputs:
        """The first `rows` samples. The caller has waited for `d2h_done`."""
        out = self._out[:, :rows]
        return Outputs(out[0].copy(), out[1].view(np.float32).copy(), out[2].view(np.float32).copy())
