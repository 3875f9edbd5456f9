"""`ModelRunner`: a step's device work, from a slot's inputs to its outputs. Everything here runs on the compute stream.

A decode step is `carry-over ▸ block table ▸ model ▸ sampler`, allocates nothing that a graph's pool doesn't hold, and
reads no value back to the host: it can be captured. A prefill step does the same for ragged chunks, eagerly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout.engine import carry_over, sampler
from rollout.engine.attention import PagedStep
from rollout.engine.batch import ROW_STATE_FIELDS
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
    """

    def __init__(self, module: nn.Module, shape: ModelShape, kv: Tensor, *, max_rows: int, max_blocks: int) -> None:
        self.module = module
        self.shape = shape
        self.kv = kv
        self.block_size = kv.shape[4]
        self.scratch_row = max_rows
        device = kv.device
        self.block_table = torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device)
        # fields first, so that a gathered field is contiguous and can be read as float32
        self.row_state = torch.zeros((len(ROW_STATE_FIELDS), max_rows + 1), dtype=torch.int32, device=device)

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, previous_tokens: Tensor, out: Tensor, *, filtered: bool) -> None:
        """One token for each row.

        Args:
            inputs: the slot's device views, int32 [rows].
            previous_tokens: int32 [max_rows], what the step before sampled.
            out: int32 [fields, max_rows], written as far as there are rows.
            filtered: whether any row has top-k, top-p or min-p.
        """
        token_ids = carry_over.apply(inputs.token_ids, inputs.carry, previous_tokens)
        grows = inputs.new_block >= 0  # [rows]; the others write block 0 to the scratch row
        row = torch.where(grows, inputs.token_row, self.scratch_row).long()
        self.block_table[row, (inputs.position // self.block_size).long()] = inputs.new_block.clamp(min=0)
        step = PagedStep(self.kv, self.block_table, inputs.token_row, inputs.position)
        logits = self._forward(token_ids, step, None)
        self._sample(logits, inputs.token_row, inputs.position + 1, out, filtered=filtered)

    @torch.no_grad()
    def prefill(self, inputs: PrefillInputs, out: Tensor, *, filtered: bool) -> None:
        """Chunks of prompts: `out` gets one sample for each, of the token after its last."""
        seq_row = inputs.seq_row.long()
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
        last = inputs.query_start[1:].long() - 1  # [seqs]
        logits = self._forward(inputs.token_ids, step, last)
        position = inputs.position.index_select(0, last)
        self._sample(logits, inputs.seq_row, position + 1, out, filtered=filtered)

    @torch.no_grad()
    def probe(self) -> None:
        """Runs two tokens through the scratch row, to see that the model can be run at all.

        Raises:
            ValueError: not every layer came through paged attention, or keys and values have another shape.
        """
        device = self.kv.device
        tokens = min(2, self.block_size)
        step = PagedStep(
            self.kv,
            self.block_table,
            torch.full((tokens,), self.scratch_row, dtype=torch.int32, device=device),
            torch.arange(tokens, dtype=torch.int32, device=device),
            query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            seq_row=torch.tensor([self.scratch_row], dtype=torch.int32, device=device),
            max_query_len=tokens,
        )
        token_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        logits = self._forward(token_ids, step, torch.tensor([tokens - 1], device=device))
        missing = sorted(set(range(self.shape.num_layers)) - step.layers_seen)
        if missing:
            raise ValueError(
                f"layers {missing} of {type(self.module).__name__} have no attention that goes through transformers' "
                "AttentionInterface (state-space, linear or custom attention?): rollout can't run this model"
            )
        if logits.shape[0] != 1:
            raise ValueError(f"{type(self.module).__name__} ignores logits_to_keep: rollout can't run this model")

    def _forward(self, token_ids: Tensor, step: PagedStep, last: Tensor | None) -> Tensor:
        """Logits, [rows, vocabulary]: of every token, or of those at `last`."""
        keep = {} if last is None else {"logits_to_keep": last}
        with torch.autocast(token_ids.device.type, enabled=False):
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=step.position.unsqueeze(0),
                use_cache=False,
                paged=step,
                **keep,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _sample(self, logits: Tensor, row: Tensor, position: Tensor, out: Tensor, *, filtered: bool) -> None:
        state = self.row_state.index_select(1, row)  # [fields, rows]
        rows = row.shape[0]
        sampler.sample_into(out[:, :rows], logits, state, position, filtered=filtered)
