"""`Engine`: asynchronous continuous batching. `Engine.step` is the whole loop.

It owns streams, slots, graphs, the KV cache and the scheduler, makes them once and keeps them for its life. It refuses
weights' business (`rollout.weights`) and callers' business (`rollout.worker`): requests go in, ended ones come out.

    host     │ fill B │ launch B │ wait A │ update A │ fill A │ launch A │ wait B │ ...
    h2d      │        ├─ in B ──▶ h2d_done[B]                 ├─ in A ──▶ h2d_done[A]
    compute  │ ── batch A ──▶ compute_done[A] │ ── batch B ──▶ compute_done[B] │ ── batch A' ──
    d2h      │                                ├─ out A ─▶ d2h_done[A]          ├─ out B ─▶ d2h_done[B]

With `overlap=False` there is one slot, so each step is collected right after its launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rollout.config import EngineConfig
from rollout.engine.batch import Batch
from rollout.engine.counters import EngineCounters
from rollout.engine.memory import KVMemory, OwnWeights, device_free_bytes, weight_bytes
from rollout.engine.models.hf import capture_obstacle, compute_dtype, model_shape
from rollout.engine.recorder import NoRecorder, Recorder
from rollout.engine.runner import ModelRunner
from rollout.engine.scheduler import Ended, Scheduler
from rollout.engine.slots import Slot
from rollout.engine.steps import Steps
from rollout.engine.streams import Streams, make_streams
from rollout.types import MemoryReport, Request


class Engine:
    """One engine for one module on one device, driven by one thread.

    Args:
        module: the engine's own Hugging Face module, from `rollout.engine.models.hf.build_module`.
        config: sizes and switches.
        eos_token_ids: ids that end a completion.
        own_weights: memory of those of the module's weights that are the engine's own; None: they stay where they are.
        recorder: receives spans of host and device work.
        on_capture: called with (done, all) after each captured graph.

    Raises:
        ValueError: the module can't be run here, or the cache doesn't fit; the message says what to change.
    """

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...] = (),
        own_weights: OwnWeights | None = None,
        recorder: Recorder | None = None,
        on_capture: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device, self.dtype = next(module.parameters()).device, compute_dtype(module)
        self.module = module
        self.config = config
        self.recorder: Recorder = recorder or NoRecorder()
        self.shape = model_shape(module)
        self.max_model_len = self._model_len(config, self.shape.max_position_embeddings)
        max_blocks = -(-self.max_model_len // config.block_size)
        self.own_weights = own_weights or OwnWeights(self.device)
        self.kv_memory = KVMemory(self.shape, config, self.max_model_len, self.dtype, self.device)
        self.kv = self.kv_memory.tensor
        self.streams: Streams = make_streams(self.device)
        self.scheduler = Scheduler(
            max_rows=config.max_rows,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            num_blocks=self.kv_memory.blocks,
            max_prefill_tokens=config.max_prefill_tokens,
            eos_token_ids=eos_token_ids,
        )
        self.slots = [
            Slot(
                index,
                max_rows=config.max_rows,
                max_prefill_tokens=config.max_prefill_tokens,
                max_blocks=max_blocks,
                device=self.device,
                streams=self.streams,
            )
            for index in range(config.num_slots)
        ]
        self.streams.follow_current()  # which may still be filling the module
        with self.streams.compute.use():
            self.runner = ModelRunner(
                module,
                self.shape,
                self.kv,
                max_rows=config.max_rows,
                max_blocks=max_blocks,
                fused=config.fused_decoder,
            )
        self.streams.synchronize()
        self.steps = Steps(
            self.runner,
            self.slots,
            self.streams,
            config=config,
            device=self.device,
            use_graphs=self._uses_graphs(),
            parameters=sum(p.numel() for p in module.parameters()),
            max_blocks=max_blocks,
        )
        self.counters = EngineCounters()
        self._in_flight: deque[tuple[Slot, Batch]] = deque()
        self._ended_early: list[Ended] = []
        self._steps = 0
        self._failure: BaseException | None = None
        self._working = 0  # how deep in the engine's own work the host is
        self._left: list[int] = []  # calls that were left meanwhile
        self.asleep = False
        self.capture(filtered=False, on_capture=on_capture)

    def _model_len(self, config: EngineConfig, positions: int) -> int:
        if config.max_model_len is None:
            return positions
        if config.max_model_len > positions:
            raise ValueError(f"max_model_len={config.max_model_len}, but the model has {positions} positions: lower it")
        return config.max_model_len

    def _uses_graphs(self) -> bool:
        on_cuda = self.device.type == "cuda"
        obstacle = capture_obstacle(self.module) if on_cuda else None
        if self.config.use_graphs and obstacle:
            raise ValueError(f"{obstacle}: set EngineConfig.use_graphs=False or another dtype")
        return on_cuda and obstacle is None if self.config.use_graphs is None else self.config.use_graphs

    # The loop

    def step(self) -> list[Ended]:
        """Launches the next batch, then collects the one before it, whose host work the device doesn't wait for.

        Returns:
            The requests that ended.
        """
        with self._failing_whole():
            batch = self._schedule()
            if batch is not None:
                slot = self.slots[batch.step % len(self.slots)]
                launch = self._fill(slot, batch)
                self._launch(slot, launch)
                self._in_flight.append((slot, batch))
            ended, self._ended_early = self._ended_early, []
            if batch is None or len(self._in_flight) == len(self.slots):
                ended += self._collect()
            return ended

    def _schedule(self) -> Batch | None:
        assert not self.asleep, "wake first"
        with self.recorder.host("schedule", self._steps):
            batch = self.scheduler.schedule(self._in_flight[-1][1] if self._in_flight else None)
            if batch is not None:
                batch.step = self._steps
                self._steps += 1
                self._count(batch)
        return batch

    def _fill(self, slot: Slot, batch: Batch) -> Callable[[], None]:
        """Writes `batch` to the slot's host buffers. Returns its device work."""
        with self.recorder.host("fill", batch.step):
            return self.steps.fill(slot, batch)

    def _launch(self, slot: Slot, device_work: Callable[[], None]) -> None:
        """Enqueues copy in, device work and copy out. Returns at once; events keep the order."""
        streams = self.streams
        with self.recorder.host("launch", self._steps - 1):
            with streams.h2d.use():
                streams.h2d.record(slot.h2d_start)
                slot.copy_in()
                streams.h2d.record(slot.h2d_done)
            streams.compute.wait(slot.h2d_done)
            with streams.compute.use():
                device_work()
                streams.compute.record(slot.compute_done)
            streams.d2h.wait(slot.compute_done)
            with streams.d2h.use():
                slot.copy_out()
                streams.d2h.record(slot.d2h_done)

    def _collect(self) -> list[Ended]:
        """Waits for the oldest step in flight, the one place where the host waits, and takes its tokens."""
        if not self._in_flight:
            assert not self.scheduler.has_work, "sequences are left, but none can be scheduled"
            return []
        slot, batch = self._in_flight.popleft()
        with self.recorder.host("wait", batch.step):
            slot.d2h_done.synchronize()
        with self.recorder.host("update", batch.step):
            out = slot.outputs(batch.rows.size)
            ended = self.scheduler.update(batch, out.token_ids, out.logprobs, out.kept_mass)
        self._note_times(slot, batch)
        return ended

    # Requests

    def add(self, requests: list[Request]) -> None:
        """Queues requests that `check` has let pass."""
        with self._failing_whole():
            if any(request.params.filtered for request in requests):
                self._ended_early += self.drain()  # a capture runs through the slots' buffers
                self.capture(filtered=True)
            if not self.scheduler.has_work:
                self._ended_early += self.drain()  # a step may be in flight whose rows have all ended meanwhile
                self.begin_phase()
            for request in requests:
                self.scheduler.add(request)

    def check(self, requests: list[Request]) -> None:
        """Raises ValueError if one of `requests` could never run here, saying what to change."""
        self._raise_failure()
        for request in requests:
            self._check_ids(request)
            self.scheduler.check(request)

    def _check_ids(self, request: Request) -> None:
        vocabulary = self.shape.vocab_size
        if request.prompt_ids and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise ValueError(f"prompt {request.group} has token ids outside of the model's 0 to {vocabulary - 1}")

    def abort(self, call: int) -> list[Ended]:
        """Ends all sequences of one call, with what they have.

        In the midst of a step, where Python may close a stream that nobody holds, they end behind it, and unseen.
        """
        if self._working:
            self._left.append(call)
            return []
        with self._at_work():
            return self.scheduler.abort(call)

    @property
    def has_work(self) -> bool:
        """Whether sequences wait or run, or a step is in flight."""
        return self.scheduler.has_work or bool(self._in_flight) or bool(self._ended_early)

    @property
    def failed(self) -> bool:
        """Whether the loop has broken; every call raises from then on."""
        return self._failure is not None

    # Between steps and phases

    def begin_phase(self) -> None:
        """Orders the engine after what the current stream holds, as the learner's writes to shared weights."""
        assert not self._in_flight
        self.streams.follow_current()
        self.counters.forget_last_step()

    def drain(self) -> list[Ended]:
        """Collects every step in flight, and launches none. The device is then idle, as weights need it."""
        ended = []
        with self._failing_whole():
            while self._in_flight:
                ended += self._collect()
        return ended

    def publish_weights(self, version: int, *, keep_kv: bool = False) -> None:
        """Goes on under policy `version`, whose weights are in place. Nothing may be in flight.

        Args:
            version: what tokens from now on are marked with.
            keep_kv: whether running sequences keep keys and values of older weights, rather than compute them again.
        """
        assert not self._in_flight, "drain before weights change"
        with self._at_work():
            self.scheduler.new_version(version, keep_kv=keep_kv)
        self.begin_phase()

    def lend_kv(self, size: int) -> Tensor | None:
        """The KV cache's memory, uint8, to be overwritten until the next step; None asleep, or if `size` is more.

        Running sequences go back to the queue with their tokens, and are computed again. Nothing may be in flight.
        """
        assert not self._in_flight, "drain before the cache is overwritten"
        if self.asleep or self.kv_memory.mapped_bytes < size:
            return None
        with self._at_work():
            self.scheduler.suspend()
        return self.kv_memory.bytes

    def sleep(self) -> list[Ended]:
        """Gives the memory of the KV cache and of the engine's own weights back; graphs, slots and addresses stay.

        Running sequences go back to the queue with their tokens, and are computed again after `wake`.

        Returns:
            The requests that ended in the step that was in flight.
        """
        ended = self.drain()
        if self.asleep:
            return ended
        with self._failing_whole():
            self.scheduler.suspend()
            with self.streams.compute.use():
                # NOTE: next time there may be fewer blocks, and no stale entry may lead a kernel to one that is gone.
                self.runner.block_table.zero_()
            self.streams.synchronize()
            self.kv_memory.sleep()
            self.own_weights.sleep()
            self.asleep = True
        return ended

    def wake(self) -> None:
        """Takes the KV cache's memory again, as much as is free, at its old addresses. Nothing is captured again.

        Weights that `sleep` gave back come with the next exchange; room is left for them.

        Raises:
            torch.OutOfMemoryError: not even the least is free. The engine stays asleep, and nothing is lost.
        """
        self._raise_failure()
        if self.asleep:
            waiting_blocks = self.scheduler.longest_blocks + 1
            blocks = self.kv_memory.wake(waiting_blocks, spare_bytes=self.own_weights.missing_bytes)
            self.scheduler.resize(blocks)
            self.asleep = False
            self.begin_phase()

    def memory_report(self) -> MemoryReport:
        """Where memory is now."""
        own_bytes, shared_bytes = weight_bytes(self.module, self.own_weights)
        rows = (self.runner.block_table, self.runner.row_state)
        return MemoryReport(
            kv_bytes=self.kv_memory.mapped_bytes,
            kv_blocks=self.kv_memory.blocks,
            weights_own_bytes=own_bytes,
            weights_shared_bytes=shared_bytes,
            graphs_bytes=self.steps.graphs_bytes,
            slots_bytes=sum(slot.bytes for slot in self.slots) + sum(t.nbytes for t in rows),
            free_bytes=device_free_bytes(self.device),
        )

    def capture(self, *, filtered: bool, on_capture: Callable[[int, int], None] | None = None) -> None:
        """Captures the graphs of all steps with filters, or without, where that has yet to be done. See `Steps`."""
        assert not self._in_flight, "a capture runs through the slots' buffers"
        assert not self.asleep, "a capture writes to the scratch block"
        self.steps.capture(filtered=filtered, on_capture=on_capture)

    def close(self) -> None:
        """Waits for the device and gives memory back."""
        self._in_flight.clear()
        self.streams.synchronize()
        self.steps.graphs.clear()
        del self.kv, self.runner, self.slots, self.steps
        self.kv_memory.close()
        self.own_weights.close()

    # Bookkeeping

    def _count(self, batch: Batch) -> None:
        blocks = self.scheduler.blocks
        self.counters.launched(batch, self.config.max_rows, blocks.used, blocks.capacity)

    def _note_times(self, slot: Slot, batch: Batch) -> None:
        at = self.streams.seconds
        start_s, end_s = at(slot.compute_start), at(slot.compute_done)
        self.counters.ran(batch, start_s, end_s)
        if self.recorder.enabled:
            name = f"{batch.kind} {batch.rows.size}"
            self.recorder.device("h2d", "in", batch.step, at(slot.h2d_start), at(slot.h2d_done))
            self.recorder.device("compute", name, batch.step, start_s, end_s)
            self.recorder.device("d2h", "out", batch.step, end_s, at(slot.d2h_done))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has failed and takes no more requests; make a new worker") from self._failure

    @contextmanager
    def _failing_whole(self) -> Iterator[None]:
        """Whatever breaks the loop breaks it for every caller, with the same cause."""
        self._raise_failure()
        with self._at_work():
            try:
                yield
            except BaseException as error:
                self._failure = error
                raise

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The scheduler is busy: calls that are left meanwhile end behind it."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            while self._left and not self._working and self._failure is None:
                self.abort(self._left.pop())
