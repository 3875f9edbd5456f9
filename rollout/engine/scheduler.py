"""`Scheduler`: which sequences run in the next step, and what a step's tokens mean for them.

Pure host code: no device, no streams, tested alone. It refuses nothing that `check` let in: every request that was
added comes out, at the latest when it is alone.

A step is either a prefill of prompt chunks or one decode of every running row. Work is scheduled one step ahead of what
is known: a row decodes in step N+1 while its token of step N is still in flight. So `schedule` counts a launched token
as there, and `update` drops the tokens of rows that have ended or changed hands since (their epoch differs).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.engine import carry_over
from rollout.engine.batch import Batch, Prefill
from rollout.engine.kv_cache import BlockAllocator, IntArray
from rollout.engine.lengths import LengthEstimate
from rollout.engine.sequence import RowTable, Sequence
from rollout.types import Completion, FinishReason, Request

_EMPTY = np.empty(0, np.int32)


@dataclass(slots=True)
class Ended:
    """A request that left the engine: with its completion, or because its logits were not finite."""

    request: Request
    completion: Completion
    non_finite: bool = False


@dataclass(slots=True)
class SchedulerCounters:
    """Sums over the engine's life."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_prompt_tokens: int = 0
    dropped_tokens: int = 0
    preemptions: int = 0
    completions: int = 0


class Scheduler:
    """Admits, grows, preempts and ends sequences. See the module's docstring.

    Args:
        max_rows: sequences that run at once.
        max_model_len: longest prompt and completion, in tokens.
        block_size: positions in a KV block.
        num_blocks: of the cache, the scratch block included.
        max_prefill_tokens: prompt tokens computed in one step.
        eos_token_ids: ids that end a completion.
        admission_rows: free rows that admission waits for while others decode; None: a sixteenth of `max_rows`.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        max_prefill_tokens: int,
        eos_token_ids: tuple[int, ...],
        admission_rows: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_prefill_tokens = max_prefill_tokens
        self.admission_rows = max(1, max_rows // 16) if admission_rows is None else admission_rows
        self.eos_token_ids = np.asarray(eos_token_ids, np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.blocks = BlockAllocator(num_blocks)
        self.rows = RowTable(max_rows, max_model_len, max_blocks)
        self.waiting: deque[Sequence] = deque()
        self.counters = SchedulerCounters()
        self.lengths = LengthEstimate(block_size)
        self.version = 0
        self._prefilling: list[int] = []  # rows whose prompt is computed in part
        self._arrivals = 0

    # What can be asked for

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that could never run here, saying what to change."""
        prompt, wanted = len(request.prompt_ids), len(request.prompt_ids) + request.params.max_tokens
        if prompt == 0:
            raise ValueError(f"prompt {request.group} is empty: give it at least one token id")
        if prompt >= self.max_model_len:
            raise ValueError(
                f"prompt {request.group} has {prompt} tokens, but prompt and completion together hold at most "
                f"{self.max_model_len}: shorten the prompt or raise EngineConfig.max_model_len"
            )
        if wanted > self.max_model_len:
            raise ValueError(
                f"prompt {request.group} ({prompt} tokens) with max_tokens={request.params.max_tokens} makes {wanted} "
                f"tokens, more than the {self.max_model_len} that the engine holds for one sequence: lower max_tokens "
                f"to {self.max_model_len - prompt} or raise EngineConfig.max_model_len"
            )
        if (blocks := -(-wanted // self.block_size)) > self.blocks.capacity:
            room = self.blocks.capacity * self.block_size - prompt
            raise ValueError(
                f"prompt {request.group} ({prompt} tokens) with max_tokens={request.params.max_tokens} needs {blocks} "
                f"KV blocks, the cache has {self.blocks.capacity}: "
                f"{f'lower max_tokens to {room}' if room > 0 else 'shorten the prompt'} or give the cache more memory "
                "(EngineConfig.kv_cache_fraction, kv_cache_bytes)"
            )

    def add(self, request: Request) -> None:
        """Queues a request that `check` has let pass."""
        self._arrivals += 1
        prompt = np.asarray(request.prompt_ids, np.int32)
        self.waiting.append(Sequence(request, prompt, order=self._arrivals))

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting) or self.rows.num_live > 0

    # Scheduling

    def schedule(self, in_flight: Batch | None = None) -> Batch | None:
        """The next step's work, or None when there is none to launch.

        Args:
            in_flight: the batch launched and not yet updated, whose tokens the host doesn't have.
        """
        if self._prefilling or self._admits_now():
            batch = self._schedule_prefill()
            if batch is not None:
                return batch
        return self._schedule_decode(in_flight)

    def _admits_now(self) -> bool:
        """Waits for `admission_rows` to be free, lest decoding stalls for one prompt at a time."""
        if not self.waiting or self.rows.num_free == 0:
            return False
        if not self.rows.decoding.any():
            return True
        return self.rows.num_free >= min(len(self.waiting), self.admission_rows)

    def _schedule_prefill(self) -> Batch | None:
        budget = self.max_prefill_tokens
        chunks: list[tuple[int, int]] = []  # (row, tokens)
        for row in self._prefilling:
            budget -= self._add_chunk(chunks, row, budget)
        reserve = self._blocks_still_needed()
        while budget > 0 and self.waiting and self.rows.num_free:
            placed = self._admit(self.waiting[0], reserve)
            if placed is None:
                break
            self.waiting.popleft()
            row, needed = placed
            reserve += needed
            budget -= self._add_chunk(chunks, row, budget)
        admitted = [row for row, _ in chunks if row not in self._prefilling]
        self._prefilling = [row for row in self._prefilling + admitted if not self.rows.decoding[row]]
        return self._prefill_batch(chunks) if chunks else None

    def _admit(self, sequence: Sequence, reserve: int) -> tuple[int, int] | None:
        """Gives `sequence` a row and the blocks of its prompt, if what runs already keeps room to grow.

        Returns:
            The row, and the blocks it will want beyond these; None if it must wait.
        """
        tokens = sequence.known_tokens()
        # the last token is always computed: its logits are what the first sample comes from
        shared = self.blocks.match(sequence.digests(self.block_size)[: (tokens.size - 1) // self.block_size])
        wanted = -(-tokens.size // self.block_size) - shared.size
        available = self.blocks.available - self.blocks.idle_among(shared)
        limit = sequence.prompt.size + sequence.request.params.max_tokens
        growth = self.lengths.blocks(tokens.size, sequence.token_ids.size, limit) - wanted - shared.size
        alone = self.rows.num_live == 0
        if wanted > available or (not alone and wanted + growth + reserve > available):
            return None
        self.blocks.share(shared)
        own = self.blocks.allocate(wanted)
        row = self.rows.place(sequence)
        self.rows.blocks[row, : shared.size] = shared
        self.rows.blocks[row, shared.size : shared.size + wanted] = own
        self.rows.num_blocks[row] = shared.size + wanted
        self.rows.length[row] = shared.size * self.block_size
        self.counters.cached_prompt_tokens += shared.size * self.block_size
        sequence.mark_version(sequence.token_ids.size, self.version)
        return row, int(growth)

    def _add_chunk(self, chunks: list[tuple[int, int]], row: int, budget: int) -> int:
        sequence, start = self.rows.sequence_in(row), int(self.rows.length[row])
        known = sequence.known_tokens().size
        count = min(budget, known - start)
        if count > 0:
            chunks.append((row, count))
            self.rows.length[row] = start + count
            self.rows.decoding[row] = start + count == known
            full = slice(start // self.block_size, (start + count) // self.block_size)
            for digest, block in zip(
                sequence.digests(self.block_size)[full], self.rows.blocks[row, full].tolist(), strict=True
            ):
                self.blocks.publish(digest, block)
        return count

    def _prefill_batch(self, chunks: list[tuple[int, int]]) -> Batch:
        rows = np.asarray([row for row, _ in chunks], np.int32)
        counts = np.asarray([count for _, count in chunks], np.int32)
        width = int(self.rows.num_blocks[rows].max())
        ids, positions = [], []
        for row, count in chunks:
            end = int(self.rows.length[row])
            ids.append(self.rows.sequence_in(row).known_tokens()[end - count : end])
            positions.append(np.arange(end - count, end, dtype=np.int32))
        self.counters.prefill_tokens += int(counts.sum())
        return Batch(
            rows=rows,
            epochs=self.rows.epoch[rows],
            token_ids=np.concatenate(ids),
            position=np.concatenate(positions),
            token_row=np.repeat(rows, counts),
            carry=_EMPTY,
            new_block=_EMPTY,
            filtered=bool(self.rows.filtered[rows].any()),
            prefill=Prefill(
                query_start=np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)]),
                tables=self.rows.blocks[rows, :width],
                row_state=self.rows.state[rows],
                complete=self.rows.decoding[rows],
            ),
        )

    def _schedule_decode(self, in_flight: Batch | None) -> Batch | None:
        table = self.rows
        while True:
            rows = np.flatnonzero(table.decoding & (table.length + 1 < table.limit)).astype(np.int32)
            if rows.size == 0:
                return None
            position = table.length[rows]
            crossing = position % self.block_size == 0  # these rows begin a new block
            missing = int(crossing.sum()) - self.blocks.available
            if missing <= 0:
                break
            self._preempt_youngest()
        new_block = np.full(rows.size, -1, np.int32)
        if crossing.any():
            grown = rows[crossing]
            new_block[crossing] = self.blocks.allocate(grown.size)
            table.blocks[grown, position[crossing] // self.block_size] = new_block[crossing]
            table.num_blocks[grown] += 1
        carry = carry_over.plan(rows, self._counting_rows(in_flight), table.max_rows)
        table.length[rows] += 1
        return Batch(
            rows=rows,
            epochs=table.epoch[rows],
            token_ids=np.where(carry >= 0, 0, table.last_token[rows]).astype(np.int32),
            position=position,
            token_row=rows,
            carry=carry,
            new_block=new_block,
            filtered=bool(table.filtered[rows].any()),
        )

    def _counting_rows(self, batch: Batch | None) -> IntArray | None:
        """The rows of `batch` whose sample will count, -1 for the others; None for no batch."""
        if batch is None:
            return None
        return np.where(self._counts(batch), batch.rows, -1).astype(np.int32)

    def _counts(self, batch: Batch) -> npt.NDArray[np.bool_]:
        alive: npt.NDArray[np.bool_] = self.rows.epoch[batch.rows] == batch.epochs
        return alive if batch.prefill is None else alive & batch.prefill.complete

    # Room to grow

    def _blocks_still_needed(self) -> int:
        """Blocks that running sequences are expected to take yet."""
        table = self.rows
        live = np.flatnonzero(table.occupied)
        known = table.prompt_length[live] + table.num_tokens[live]
        expected = self.lengths.blocks(known, table.num_tokens[live], table.limit[live])
        return int(np.maximum(expected - table.num_blocks[live], 0).sum())

    def _preempt_youngest(self) -> None:
        live = np.flatnonzero(self.rows.occupied)
        assert live.size > 1, "one sequence alone always fits: check() saw to that"
        self.preempt(int(live[np.argmax(self.rows.order[live])]))
        self.counters.preemptions += 1

    def preempt(self, row: int) -> None:
        """Sends the sequence in `row` back to the head of the queue. It keeps its tokens and recomputes its KV.

        A token in flight is dropped, and sampled again alike: random numbers are keyed by position.
        """
        self.waiting.appendleft(self._leave(row))

    def preempt_all(self, sequences: list[Sequence] | None = None) -> None:
        """Preempts every running sequence, or these, so that the oldest is resumed first."""
        for sequence in sorted(self.rows.live() if sequences is None else sequences, key=lambda s: -s.order):
            self.preempt(sequence.row)

    def _leave(self, row: int) -> Sequence:
        self.blocks.release(self.rows.blocks[row, : self.rows.num_blocks[row]])
        if row in self._prefilling:
            self._prefilling.remove(row)
        return self.rows.take_back(row)

    # What a step brought

    def update(
        self,
        batch: Batch,
        token_ids: IntArray,
        logprobs: npt.NDArray[np.float32],
        kept_mass: npt.NDArray[np.float32],
    ) -> list[Ended]:
        """Takes a step's samples, each [rows], and ends the sequences that are done with them."""
        counts = self._counts(batch)
        complete = counts.size if batch.prefill is None else int(batch.prefill.complete.sum())
        self.counters.dropped_tokens += complete - int(counts.sum())
        table, rows, tokens = self.rows, batch.rows[counts], token_ids[counts]
        if rows.size == 0:
            return []
        finite = np.isfinite(logprobs[counts])
        at = table.num_tokens[rows]
        table.token_ids[rows, at] = tokens
        table.logprobs[rows, at] = logprobs[counts]
        if batch.filtered:  # else no row here is asked for it
            table.kept_mass[rows, at] = kept_mass[counts]
        table.num_tokens[rows] = at + finite  # a token drawn from broken logits is none
        table.last_token[rows] = tokens
        self.counters.generated_tokens += int(finite.sum())
        eos = (tokens[:, None] == self.eos_token_ids).any(axis=1) & ~table.ignore_eos[rows]
        stop = (tokens[:, None] == table.stop_ids[rows]).any(axis=1)
        full = table.prompt_length[rows] + table.num_tokens[rows] >= table.limit[rows]
        ending = np.flatnonzero(eos | stop | full | ~finite)
        return [
            self._end(int(rows[i]), "eos" if eos[i] else "stop" if stop[i] else "length")
            if finite[i]
            else self._end(int(rows[i]), "aborted", non_finite=True)
            for i in ending.tolist()
        ]

    def _end(self, row: int, reason: FinishReason, *, non_finite: bool = False) -> Ended:
        sequence = self._leave(row)
        if not non_finite:
            self.lengths.observe(sequence.token_ids.size)
            self.counters.completions += 1
        return Ended(sequence.request, sequence.completion(reason), non_finite)

    def abort(self, call: int) -> list[Ended]:
        """Ends every sequence of one call, with what it has: reason "aborted"."""
        running = [s for s in self.rows.live() if s.request.call == call]
        ended = [Ended(s.request, self._leave(s.row).completion("aborted")) for s in running]
        waiting = [s for s in self.waiting if s.request.call == call]
        self.waiting = deque(s for s in self.waiting if s.request.call != call)
        return ended + [Ended(s.request, s.completion("aborted")) for s in waiting]

    # Between phases

    def new_version(self, version: int, *, keep_kv: bool = False) -> None:
        """Says that tokens from now on come from `version`. Nothing may be in flight.

        Unless `keep_kv`, what was computed under older weights is given up: prefixes are forgotten, and running
        sequences go back to the queue to be computed again. So do, in any case, those whose prompt is computed in part:
        its blocks are yet to be shared, and belong to no one version.
        """
        self.preempt_all([self.rows.sequence_in(row) for row in self._prefilling] if keep_kv else None)
        self.blocks.forget_prefixes()
        self.version = version
        for sequence in self.rows.live():
            sequence.mark_version(int(self.rows.num_tokens[sequence.row]), version)

    def suspend(self) -> None:
        """Sends every running sequence back to the queue with its tokens, and forgets prefixes: the cache is to go."""
        self.preempt_all()
        self.blocks.forget_prefixes()

    def resize(self, num_blocks: int) -> None:
        """Goes on with a cache of another size, and of none of the old contents."""
        assert self.rows.num_live == 0, "suspend before the cache changes"
        self.blocks = BlockAllocator(num_blocks)

    @property
    def longest_blocks(self) -> int:
        """Blocks that the longest of all sequences here may come to hold."""
        limits = (s.prompt.size + s.request.params.max_tokens for s in (*self.waiting, *self.rows.live()))
        return max((-(-limit // self.block_size) for limit in limits), default=0)

    def check_conservation(self) -> None:
        """Asserts that every block is accounted for and no row's block is held more often than it is referenced."""
        self.blocks.check()
        held = np.zeros(self.blocks.num_blocks, np.int64)
        for sequence in self.rows.live():
            np.add.at(held, self.rows.blocks[sequence.row, : self.rows.num_blocks[sequence.row]], 1)
        assert (held == self.blocks._references).all(), "rows and allocator disagree about who holds what"
