"""`ModelRunner`: a step's device work, from a slot's inputs to its outputs. Everything here runs on the compute stream.

A decode step is `carry-over ▸ block table ▸ model ▸ sampler`, allocates nothing that a graph's pool doesn't hold, and
reads no value back to the host: it can be captured. A prefill step does the same for ragged chunks; padded to a size,
it can be captured too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rollout.engine import kernels, sampler
from rollout.engine.attention import PagedStep
from rollout.engine.batch import ROW_STATE_FIELDS
from rollout.engine.models.forward import choose
from rollout.engine.models.hf import ModelShape
from rollout.engine.slots import DecodeInputs, PrefillInputs


class ModelRunner:
    """The model, the KV cache and the device's state of rows: block table and sampling parameters.

    Args:
        module: the engine's module, with attention "rollout".
        shape: of the model.
        kv: the cache, [blocks, layers, 2, kv heads, block size, head dim].
        max_rows: rows there can be; one more is scratch.
        max_blocks: blocks a row can hold.
        fused: whether the fused decoder may be taken.

    Raises:
        ValueError: the model can't be run.
    """

    def __init__(
        self, module: nn.Module, shape: ModelShape, kv: Tensor, *, max_rows: int, max_blocks: int, fused: bool
    ) -> None:
        self.kv = kv
        self.block_size = kv.shape[4]
        self.scratch_row = max_rows
        device = kv.device
        self.block_table = torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device)
        # fields first, so that a gathered field is contiguous and can be read as float32
        self.row_state = torch.zeros((len(ROW_STATE_FIELDS), max_rows + 1), dtype=torch.int32, device=device)
        self.forward = choose(
            module,
            num_layers=shape.num_layers,
            max_positions=max_blocks * self.block_size,
            fused=fused,
            probe=self._probe,
        )

    @torch.no_grad()
    def decode(
        self,
        inputs: DecodeInputs,
        previous_tokens: Tensor,
        out: Tensor,
        *,
        filtered: bool,
        started: Callable[[], None],
    ) -> None:
        """One token for each row.

        Args:
            inputs: the slot's device views, int32 [rows].
            previous_tokens: int32 [max_rows], what the step before sampled.
            out: int32 [fields, max_rows], written as far as there are rows.
            filtered: whether any row has top-k, top-p or min-p.
            started: called behind the first kernel. A mark put there, in the stream or in the graph, is passed once the
                device works on the step, and not while the host is still launching it.
        """
        token_ids, state, sampled_at = kernels.start_decode(
            inputs.token_ids,
            inputs.carry,
            previous_tokens,
            inputs.token_row,
            inputs.position,
            inputs.new_block,
            self.block_table,
            self.row_state,
            self.block_size,
        )
        started()
        step = PagedStep(self.kv, self.block_table, inputs.token_row, inputs.position)
        logits = self.forward(token_ids, step, None)
        sampler.sample_into(out[:, : state.shape[1]], logits, state, sampled_at, filtered=filtered)

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs, out: Tensor, *, filtered: bool, started: Callable[[], None]) -> None:
        """Chunks of prompts: `out` gets one sample for each, of the token after its last. See `decode`."""
        rows = inputs.rows
        seq_row = inputs.seq_row[:rows].long()
        started()
        self.block_table[seq_row, : inputs.tables.shape[1]] = inputs.tables
        self.row_state[:, seq_row] = inputs.row_state.t()
        step = PagedStep(
            self.kv,
            self.block_table,
            inputs.token_row,
            inputs.position,
            query_start=inputs.query_start,
            seq_row=inputs.seq_row,
            max_query_len=inputs.max_query_len,
        )
        last = inputs.query_start[1 : rows + 1].long() - 1  # [rows]
        logits = self.forward(inputs.token_ids, step, last)
        position = inputs.position.index_select(0, last)
        state = self.row_state.index_select(1, inputs.seq_row[:rows])  # [fields, rows]
        sampler.sample_into(out[:, :rows], logits, state, position + 1, filtered=filtered)

    def _probe(self) -> PagedStep:
        """A prefill of two tokens in the scratch row."""
        device = self.kv.device
        return PagedStep(
            self.kv,
            self.block_table,
            torch.full((2,), self.scratch_row, dtype=torch.int32, device=device),
            torch.arange(2, dtype=torch.int32, device=device),
            query_start=torch.tensor([0, 2], dtype=torch.int32, device=device),
            seq_row=torch.tensor([self.scratch_row], dtype=torch.int32, device=device),
            max_query_len=2,
        )
