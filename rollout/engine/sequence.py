"""`Sequence`, a request's progress, and `RowTable`, the host state of everything that runs, as arrays indexed by row.

The arrays are what lets a decode step be scheduled and updated without a Python loop over sequences.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from rollout.engine.batch import ROW_STATE_FIELDS
from rollout.engine.kv_cache import IntArray, prefix_digests
from rollout.types import MAX_STOP_IDS, Completion, FinishReason, Request, VersionRun


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine. While it holds a row, its tokens are in the row; between rows, here."""

    request: Request
    prompt: IntArray
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    kept_mass: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    version_marks: list[tuple[int, int]] = field(default_factory=list)  # (tokens before it, version)
    row: int = -1
    order: int = 0
    """Arrival: the larger, the younger."""
    _known: IntArray | None = None
    _digests: list[bytes] = field(default_factory=list)

    def known_tokens(self) -> IntArray:
        """The prompt and what had been sampled when this last left a row: what a prefill computes."""
        if self._known is None:
            self._known = np.concatenate([self.prompt, self.token_ids])
        return self._known

    def digests(self, block_size: int) -> list[bytes]:
        """Digests of the full blocks of `known_tokens`."""
        if not self._digests:
            self._digests = prefix_digests(self.known_tokens(), block_size, self.known_tokens().size // block_size)
        return self._digests

    def take_tokens(self, token_ids: IntArray, logprobs: np.ndarray, kept_mass: np.ndarray) -> None:
        """Receives copies of what its row held."""
        self.token_ids, self.logprobs, self.kept_mass = token_ids.copy(), logprobs.copy(), kept_mass.copy()
        self._known, self._digests, self.row = None, [], -1

    def mark_version(self, tokens: int, version: int) -> None:
        """Says that tokens from index `tokens` on are sampled under `version`."""
        if self.version_marks and self.version_marks[-1][0] == tokens:
            self.version_marks.pop()
        if not self.version_marks or self.version_marks[-1][1] != version:
            self.version_marks.append((tokens, version))

    def completion(self, finish_reason: FinishReason) -> Completion:
        """What came out, once the tokens are back here."""
        starts = [start for start, _ in self.version_marks] + [len(self.token_ids)]
        runs = tuple(
            VersionRun(version, end - start)
            for (start, version), end in zip(self.version_marks, starts[1:], strict=True)
            if end > start
        )
        return Completion(
            prompt_ids=list(self.request.prompt_ids),
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            finish_reason=finish_reason,
            versions=runs,
            kept_mass=self.kept_mass.tolist() if self.request.params.filtered else None,
        )


class RowTable:
    """Host state indexed by row. Large arrays are touched, and so take memory, only as far as rows fill them."""

    def __init__(self, max_rows: int, max_model_len: int, max_blocks: int) -> None:
        self.max_rows = max_rows
        self.sequence: list[Sequence | None] = [None] * max_rows
        self.occupied = np.zeros(max_rows, bool)
        self.epoch = np.zeros(max_rows, np.int32)  # counts the sequences a row has had
        self.decoding = np.zeros(max_rows, bool)  # its prompt is computed, or will be once every launched step is done
        self.length = np.zeros(max_rows, np.int32)  # positions whose KV is there once every launched step is done
        self.prompt_length = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)  # prompt and completion, in tokens
        self.num_tokens = np.zeros(max_rows, np.int32)  # sampled tokens the host has
        self.last_token = np.zeros(max_rows, np.int32)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.order = np.zeros(max_rows, np.int64)
        self.filtered = np.zeros(max_rows, bool)
        self.ignore_eos = np.zeros(max_rows, bool)
        self.stop_ids = np.full((max_rows, MAX_STOP_IDS), -1, np.int32)
        self.state = np.zeros((max_rows, len(ROW_STATE_FIELDS)), np.int32)
        self.blocks = np.zeros((max_rows, max_blocks), np.int32)
        self.token_ids = np.empty((max_rows, max_model_len), np.int32)
        self.logprobs = np.empty((max_rows, max_model_len), np.float32)
        self.kept_mass = np.empty((max_rows, max_model_len), np.float32)
        self._free = list(range(max_rows))  # a heap: equal phases take equal rows, and so round alike

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Rows with a sequence."""
        return self.max_rows - len(self._free)

    def live(self) -> list[Sequence]:
        """The sequences that hold a row."""
        return [s for s in self.sequence if s is not None]

    def sequence_in(self, row: int) -> Sequence:
        """The sequence that holds `row`."""
        sequence = self.sequence[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def place(self, sequence: Sequence) -> int:
        """Gives `sequence` a row and writes its state there; its tokens so far move into the row."""
        row = heapq.heappop(self._free)
        params = sequence.request.params
        count = sequence.token_ids.size
        self.sequence[row] = sequence
        self.occupied[row] = True
        sequence.row = row
        self.decoding[row] = False
        self.length[row] = 0
        self.prompt_length[row] = sequence.prompt.size
        self.limit[row] = sequence.prompt.size + params.max_tokens
        self.num_tokens[row] = count
        self.num_blocks[row] = 0
        self.order[row] = sequence.order
        self.filtered[row] = params.filtered
        self.ignore_eos[row] = params.ignore_eos
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(params.stop_token_ids)] = params.stop_token_ids
        self.token_ids[row, :count] = sequence.token_ids
        self.logprobs[row, :count] = sequence.logprobs
        self.kept_mass[row, :count] = sequence.kept_mass
        floats = np.asarray([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
        self.state[row] = (floats[0], *sequence.request.key, params.top_k, floats[1], floats[2])
        return row

    def take_back(self, row: int) -> Sequence:
        """Frees `row`; its tokens move back into the sequence. The caller has released its blocks."""
        sequence = self.sequence_in(row)
        count = int(self.num_tokens[row])
        sequence.take_tokens(self.token_ids[row, :count], self.logprobs[row, :count], self.kept_mass[row, :count])
        self.sequence[row] = None
        self.occupied[row] = False
        self.epoch[row] += 1
        self.decoding[row] = False
        self.num_blocks[row] = 0
        heapq.heappush(self._free, row)
        return sequence
