"""`RolloutWorker`: one engine for a training run, behind its verbs: generate, stream, exchange, sleep, wake, close.

It hands calls' requests to the engine and ended ones back, counts policy versions, and refuses what its state doesn't
allow. It doesn't know who trains: trainers' glue is in `rollout.integrations`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from tqdm.auto import tqdm

from rollout.calls import CallProgress, Params, PhaseMeter, Prompts, make_requests, model_cost
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.memory import OwnWeights
from rollout.engine.models.fused import obstacle
from rollout.engine.models.hf import body_dtype, build_module
from rollout.engine.models.join import join_projections
from rollout.engine.models.learner import sources, unwrap
from rollout.engine.recorder import Recorder
from rollout.engine.scheduler import Ended
from rollout.mail import CallStream, Mail
from rollout.observe.breakdown import EXCHANGE, GENERATE, SLEEP, WAKE, Breakdown, WallClock
from rollout.observe.metrics import PhaseMetrics, RunTotals
from rollout.observe.switches import SwitchTimes
from rollout.types import Completion, MemoryReport, NonFiniteLogitsError, Request
from rollout.weights.broadcast import BroadcastReceiver
from rollout.weights.exchange import ExchangeReport, WeightExchange
from rollout.weights.undo import Undo

KV = Literal["recompute", "keep"]


class RolloutWorker:
    """Generates completions with `model`'s weights, phase after phase, with one engine made once.

    Args:
        model: the learner, a Hugging Face causal language model; may be wrapped (DDP, PEFT, torch.compile). It is only
            read. Where dtype and device agree, the engine shares its storage.
        config: sizes and switches; the defaults suit one GPU shared with a learner.
        timeline: receives spans of host and device work, see `rollout.observe.timeline`.
        progress: whether each `generate` and `stream` shows a line: completions done, tokens a second, rows and KV in
            use, and about how long it will take.

    Raises:
        ValueError: the model can't be run, or the configuration doesn't fit; the message says what to change.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        timeline: Recorder | None = None,
        progress: bool = False,
    ) -> None:
        self.config = config or EngineConfig()
        learner = unwrap(model)
        device = next(learner.parameters()).device
        own_weights = OwnWeights(device)
        module = build_module(
            model,
            device=device,
            dtype=self.config.dtype or _engine_dtype(model, device),
            allocate=own_weights.allocate,
        )
        if self.config.fused_decoder and obstacle(module) is None:
            join_projections(module)
        self._exchange = WeightExchange(module)
        self._version = 0
        self._paused: KV | None = None
        self._calls = 0
        self._mail = Mail()
        self._weight_sync_s = 0.0
        self.metrics = PhaseMetrics()
        """Of the last `generate` or `stream` that ended."""
        self.totals = RunTotals()
        """Sums over the run."""
        self.switches = SwitchTimes()
        """Seconds of sleeping and waking."""
        self.breakdown = Breakdown()
        """Where wall time went from the end of one `generate` or `stream` to the end of the last."""
        self.total_breakdown = Breakdown()
        """Sums of these over the run."""
        eos = self.config.eos_token_ids
        with tqdm(desc="capturing graphs", unit="graph", disable=None, leave=False) as bar:
            self._engine: Engine | None = Engine(
                module,
                self.config,
                eos_token_ids=_eos_token_ids(learner) if eos is None else eos,
                own_weights=own_weights,
                recorder=timeline,
                on_capture=lambda done, whole: _show(bar, done, whole),
            )
        self._progress = progress
        self._cost = model_cost(self._engine)
        self._wall = WallClock()
        self._broken_down = copy.copy(self._engine.counters)  # up to here
        self._uncounted: PhaseMeter | None = None  # what `totals` lacks, while a call is open

    # Generating

    def generate(self, prompts: Prompts, params: Params = None) -> list[list[Completion]]:
        """Completes every prompt `n` times.

        Args:
            prompts: token ids of each prompt.
            params: one for all, or one for each prompt; None: the defaults.

        Returns:
            A group of completions for each prompt, in the order asked.

        Raises:
            ValueError: a prompt is empty or too long, or a parameter can't be met. Nothing has been started.
            NonFiniteLogitsError: the model gave NaN or infinite logits.
            RuntimeError: the worker is closed, asleep or paused, its engine has failed, or its weights aren't whole: an
                exchange couldn't be undone, or `sleep` gave them back and there was no exchange since.
        """
        groups: list[dict[int, Completion]] = [{} for _ in prompts]
        try:
            for group, sample, completion in self.stream(prompts, params):
                groups[group][sample] = completion
        except NonFiniteLogitsError as error:
            for group, samples in enumerate(groups):
                error.completions.update({(group, sample): c for sample, c in samples.items()})
            raise
        return [[samples[i] for i in range(len(samples))] for samples in groups]

    def stream(self, prompts: Prompts, params: Params = None) -> Iterator[tuple[int, int, Completion]]:
        """Like `generate`, but gives each completion as it ends.

        The engine works while the iterator is asked for the next one; several can share it. Closing it early ends its
        requests.

        Returns:
            An iterator of (prompt's index, sample's index, completion), in the order they end.

        Raises:
            As `generate`; the first kind at once, the others from the iterator. One that is asked while the worker is
            asleep or paused raises, and goes on when it is asked again later.
        """
        engine = self._ready()
        self._calls += 1
        call = self._calls
        requests = make_requests(prompts, params, call)
        engine.check(requests)
        completions = self._stream(call, requests, engine.scheduler.blocks.capacity)
        return CallStream(completions, ready=self._ready, waits=lambda: self._mail.waits(call))

    def _ready(self) -> Engine:
        """The engine, where it can generate."""
        engine = self._open()
        if self._paused is not None:
            raise RuntimeError("the worker is paused: leave `with worker.paused()` before generating")
        if engine.asleep:
            raise RuntimeError("the worker is asleep: wake() it before generating")
        if not self._exchange.intact:
            raise RuntimeError("the last weight exchange couldn't be undone: exchange again before generating")
        if not engine.own_weights.present:
            raise RuntimeError("sleep() gave the engine's own weights back: exchange() before generating")
        return engine

    def _stream(
        self, call: int, requests: list[Request], checked_blocks: int
    ) -> Generator[tuple[int, int, Completion], None, None]:
        engine = self._open()
        if engine.scheduler.blocks.capacity < checked_blocks:
            engine.check(requests)  # the cache has shrunk since they were let pass
        phase = PhaseMeter(engine, self._cost)
        self._uncounted = self._uncounted or phase
        progress = CallProgress(engine, phase, len(requests)) if self._progress else None
        self._mail.open(call, len(requests))
        self._wall.enter(GENERATE)
        try:
            engine.add(requests)
            while True:
                while (ended := self._mail.take(call)) is not None:
                    if ended.non_finite:
                        raise self._non_finite(call, ended)
                    phase.ended(ended.completion)
                    yield ended.request.group, ended.request.sample, ended.completion
                if not self._mail.outstanding(call):
                    break
                self._mail.deliver(self._open().step())
                if progress is not None:
                    progress.stepped()
        finally:
            self._leave(call)
            if progress is not None:
                progress.close()
            self._wall.leave(GENERATE)
            if self._engine is not None:
                self._end_phase(phase, self._engine)

    def _non_finite(self, call: int, ended: Ended) -> NonFiniteLogitsError:
        request = ended.request
        if self._engine is not None:
            self._mail.deliver(self._engine.abort(call))
        there = [ended, *self._mail.untaken(call)]
        return NonFiniteLogitsError(
            f"the model gave NaN or infinite logits for prompt {request.group}, sample {request.sample}, after "
            f"{len(ended.completion.token_ids)} tokens: look for diverged weights (learning rate, gradient clipping) "
            "or a dtype too narrow for this model (EngineConfig.dtype)",
            request,
            {(e.request.group, e.request.sample): e.completion for e in there},
        )

    def _leave(self, call: int) -> None:
        """Takes a call's traces away, and its requests where it was left early."""
        if self._mail.outstanding(call) and self._engine is not None:
            self._engine.abort(call)
        self._mail.close(call)
        if self._engine is not None and not self._mail.any_open and not self._engine.failed:
            self._engine.drain()  # a step launched before its rows had ended

    def _end_phase(self, phase: PhaseMeter, engine: Engine) -> None:
        self.metrics = phase.metrics(self._version, self._weight_sync_s)
        assert self._uncounted is not None
        # what several calls did together counts in each one's metrics, but once in the run's totals
        whole = self.metrics if self._uncounted is phase else self._uncounted.metrics(self._version, 0.0)
        self.totals.add(replace(whole, completion_lengths=self.metrics.completion_lengths))
        self._uncounted = PhaseMeter(engine) if self._mail.any_open else None
        self._weight_sync_s = 0.0
        engine.counters.settle()
        self.breakdown = Breakdown.of(self._wall.lap(), engine.counters.since(self._broken_down))
        self.total_breakdown += self.breakdown
        self._broken_down = copy.copy(engine.counters)

    # Weights

    @property
    def policy_version(self) -> int:
        """How many weight exchanges there have been."""
        return self._version

    @property
    def needs_exchange(self) -> bool:
        """Whether nothing can be generated before an exchange: own weights went with `sleep`, or one wasn't undone."""
        return not (self._exchange.intact and self._open().own_weights.present)

    def exchange(self, learner: nn.Module | BroadcastReceiver, *, kv: KV | None = None) -> ExchangeReport:
        """Takes over `learner`'s weights, in place, as the next policy version.

        The step in flight is collected first, so no forward reads weights while they change. All cached prefixes are
        forgotten. Running requests go on under the new version. Asleep, weights of the engine's own get their memory
        again and are filled; the KV cache gets none before `wake`, so old weights, new weights and KV never pile up.

        Args:
            learner: the model given at the start, or one with the same parameters; or a `BroadcastReceiver`, where the
                learner is in other processes, which call `BroadcastSender.send` meanwhile.
            kv: whether running requests compute their keys and values again, or keep those of the old weights. None:
                as the surrounding `paused` says, else "recompute". What slept has none to keep.

        Returns:
            What was shared, what was copied, and the seconds it took.

        Raises:
            ValueError: a tensor is missing, extra or of another shape. The old version is whole and goes on.
            RuntimeError: reading the learner's weights failed half-way, or some rank of a broadcast failed. What was
                written is undone: the old version is whole and goes on, if `sleep` hasn't given it up.
            torch.OutOfMemoryError: asleep, and there is no room for the engine's own weights. Nothing has changed.
        """
        # The other ranks of a broadcast wait for this one, also where it can't go on.
        with learner.taking_part() if isinstance(learner, BroadcastReceiver) else nullcontext():
            kv = _checked(kv or self._paused or "recompute")
            engine = self._open()
            start_s = time.perf_counter()
            self._mail.deliver(engine.drain())
            with self._wall.part(EXCHANGE), engine.own_weights.filling():
                report = self._exchange.exchange(learner, _undo(engine, kv))
        self._publish(engine, kv)
        seconds = time.perf_counter() - start_s
        self._weight_sync_s += seconds
        self.totals.add_exchange(seconds, self._version)
        return report

    def _publish(self, engine: Engine, kv: KV) -> None:
        self._version += 1
        engine.publish_weights(self._version, keep_kv=kv == "keep")

    @contextmanager
    def paused(self, *, kv: KV = "recompute") -> Iterator[None]:
        """Holds the engine while weights change, with requests in flight that go on after it.

        The step in flight is collected, then the body runs: nothing of the engine's reads weights or KV meanwhile. In
        the body, `exchange` as usual, or, where engine and learner share storage, step the optimiser in place. Leaving
        without an exchange publishes a new policy version if any weight is shared, for it may have changed, also when
        the body raises; where every weight is the engine's own, nothing can have changed, and all goes on as before.

        Args:
            kv: whether running requests compute their keys and values again under the new version ("recompute", exact:
                tokens are those of a fresh engine given the same prefix), or keep the old ones ("keep", cheaper). In
                both cases cached prefixes are forgotten. An exchange in the body follows it unless told otherwise.

        Raises:
            RuntimeError: it is paused already, or, on leaving, the learner has moved to other storage and there was no
                exchange to follow it.
        """
        engine = self._open()
        kv = _checked(kv)
        if self._paused is not None:
            raise RuntimeError("the worker is paused already")
        self._mail.deliver(engine.drain())
        self._paused, version = kv, self._version
        try:
            yield
            if version == self._version and self._engine is not None and (moved := self._exchange.broken_ties()):
                raise RuntimeError(
                    f"{len(moved)} of the learner's tensors that the engine shared have moved to other storage "
                    f"({', '.join(moved[:5])}): call exchange() in the body of paused()"
                )
        finally:
            self._paused = None
            if version == self._version and self._engine is not None and not engine.failed:
                if self._exchange.shares:
                    self._publish(engine, kv)
                else:
                    engine.begin_phase()

    # Memory

    @property
    def asleep(self) -> bool:
        """Whether the engine's memory is given back."""
        return self._open().asleep

    def sleep(self) -> MemoryReport:
        """Gives the engine's memory back: the KV cache, and the weights that are its own. Asleep, it does nothing.

        Graphs, slots and all addresses stay, and so do weights shared with the learner. The step in flight is collected
        first; requests in flight keep their tokens and go on after `wake`, computing their keys and values again.

        Returns:
            Where memory is now.

        Raises:
            RuntimeError: the worker is closed or its engine has failed.
        """
        engine = self._open()
        if not engine.asleep:
            start_s = time.perf_counter()
            self._mail.deliver(engine.drain())
            with self._wall.part(SLEEP):
                self._mail.deliver(engine.sleep())
            self.switches.slept(time.perf_counter() - start_s)
        return engine.memory_report()

    def wake(self) -> MemoryReport:
        """Takes the KV cache's memory again, at the same addresses, so that requests can run. Awake, it does nothing.

        It takes what `kv_cache_fraction` or `kv_cache_bytes` ask for of the memory that is free now, down to
        `kv_cache_min_bytes`; blocks may be more or fewer than before. If the engine has weights of its own, exchange
        before: they are gone, and room for them is left free here.

        Returns:
            Where memory is now.

        Raises:
            torch.OutOfMemoryError: not even the least is free, with the numbers. The worker stays asleep, loses nothing
                and can be woken when memory is free.
            RuntimeError: the worker is closed or its engine has failed.
        """
        engine = self._open()
        if engine.asleep:
            start_s = time.perf_counter()
            with self._wall.part(WAKE):
                engine.wake()
            self.switches.woke(time.perf_counter() - start_s)
        return engine.memory_report()

    def memory_report(self) -> MemoryReport:
        """Where the engine's memory is, in bytes."""
        return self._open().memory_report()

    # Life

    @property
    def engine(self) -> Engine:
        """The engine, for those who look inside: addresses, captures, counters."""
        return self._open()

    def as_rollout_func(self, *, log_dir: str | Path | None = None) -> Callable[..., dict[str, Any]]:
        """This worker as TRL's `rollout_func`; see `rollout.integrations.trl.rollout_func`."""
        from rollout.integrations.trl import rollout_func

        function: Callable[..., dict[str, Any]] = rollout_func(self, log_dir=log_dir)
        return function

    def close(self) -> None:
        """Gives the engine's memory back. What is running is lost; every later call raises."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _open(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this RolloutWorker is closed: make a new one")
        return self._engine

    def __enter__(self) -> RolloutWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _undo(engine: Engine, kv: KV) -> Undo:
    """For an exchange: its old values may overwrite keys and values that are to be computed again."""
    own = engine.own_weights
    return Undo(
        lost=lambda weight: not own.present and own.holds(weight),
        borrow=engine.lend_kv if kv == "recompute" else lambda size: None,
    )


def _checked(kv: KV) -> KV:
    if kv not in ("recompute", "keep"):
        raise ValueError(f"kv must be 'recompute' or 'keep', not {kv!r}")
    return kv


def _engine_dtype(learner: nn.Module, device: torch.device) -> torch.dtype:
    dtype = body_dtype(sources(learner))
    return torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype


def _eos_token_ids(learner: nn.Module) -> tuple[int, ...]:
    """End-of-sequence ids of the model's generation config, else of its config."""
    for config in (getattr(learner, "generation_config", None), getattr(learner, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _show(bar: Any, done: int, whole: int) -> None:
    bar.total = whole
    bar.update(done - bar.n)
