"""`RolloutWorker`: one engine for a training run, behind five verbs: generate, stream, exchange, sleep, close.

It turns prompts into requests and ended requests into completions, keys the random numbers, counts policy versions and
sums up phases. It refuses to know who trains: trainers' glue is in `rollout.integrations`.
"""

from __future__ import annotations

import copy
import hashlib
import os
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from rollout.config import EngineConfig
from rollout.engine.engine import Engine, Recorder
from rollout.engine.models.hf import build_module
from rollout.engine.models.learner import unwrap
from rollout.engine.scheduler import Ended
from rollout.observe.metrics import PhaseMetrics, RunTotals
from rollout.types import Completion, NonFiniteLogitsError, Request, SamplingParams
from rollout.weights.exchange import ExchangeReport, WeightExchange

Prompts = Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


class RolloutWorker:
    """Generates completions with `model`'s weights, phase after phase, with one engine made once.

    Args:
        model: the learner, a Hugging Face causal language model; may be wrapped (DDP, PEFT, torch.compile). It is only
            read. Where dtype and device agree, the engine shares its storage.
        config: sizes and switches; the defaults suit one GPU shared with a learner.
        timeline: receives spans of host and device work, see `rollout.observe.timeline`.

    Raises:
        ValueError: the model can't be run, or the configuration doesn't fit; the message says what to change.
    """

    def __init__(
        self, model: nn.Module, config: EngineConfig | None = None, *, timeline: Recorder | None = None
    ) -> None:
        self.config = config or EngineConfig()
        learner = unwrap(model)
        parameter = next(learner.parameters())
        module = build_module(model, device=parameter.device, dtype=self.config.dtype or _engine_dtype(parameter))
        self._exchange = WeightExchange(module)
        self._version = 0
        self._calls = 0
        self._outstanding: Counter[int] = Counter()  # requests of each call that haven't ended
        self._mail: defaultdict[int, deque[Ended]] = defaultdict(deque)
        self._weight_sync_s = 0.0
        self.metrics = PhaseMetrics()
        """Of the last `generate` or `stream` that ended."""
        self.totals = RunTotals()
        """Sums over the run."""
        eos = self.config.eos_token_ids
        with tqdm(desc="capturing graphs", unit="graph", disable=None, leave=False) as bar:
            self._engine: Engine | None = Engine(
                module,
                self.config,
                eos_token_ids=_eos_token_ids(learner) if eos is None else eos,
                recorder=timeline,
                on_capture=lambda done, whole: _show(bar, done, whole),
            )

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
            RuntimeError: the worker is closed, its engine has failed, or the last exchange broke off half-way.
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
            As `generate`; the first kind at once, the others from the iterator.
        """
        engine = self._open()
        if not self._exchange.intact:
            raise RuntimeError("the last weight exchange broke off half-way: exchange again before generating")
        self._calls += 1
        requests = _requests(prompts, params, self._calls)
        engine.check(requests)
        return self._stream(self._calls, requests)

    def _stream(self, call: int, requests: list[Request]) -> Iterator[tuple[int, int, Completion]]:
        engine = self._open()
        phase = _Phase(engine)
        self._outstanding[call] = len(requests)
        try:
            engine.add(requests)
            while self._outstanding[call] or self._mail[call]:
                while self._mail[call]:
                    ended = self._mail[call].popleft()
                    if ended.non_finite:
                        raise self._non_finite(call, ended)
                    phase.lengths.append(len(ended.completion.token_ids))
                    yield ended.request.group, ended.request.sample, ended.completion
                if self._outstanding[call]:
                    self._deliver(self._open().step())
        finally:
            self._leave(call)
            if self._engine is not None:
                self._end_phase(phase)

    def _deliver(self, ended: list[Ended]) -> None:
        for one in ended:
            self._outstanding[one.request.call] -= 1
            self._mail[one.request.call].append(one)

    def _non_finite(self, call: int, ended: Ended) -> NonFiniteLogitsError:
        request = ended.request
        if self._engine is not None:
            self._deliver(self._engine.abort(call))
        there = [ended, *self._mail[call]]
        return NonFiniteLogitsError(
            f"the model gave NaN or infinite logits for prompt {request.group}, sample {request.sample}, after "
            f"{len(ended.completion.token_ids)} tokens: look for diverged weights (learning rate, gradient clipping) "
            "or a dtype too narrow for this model (EngineConfig.dtype)",
            request,
            {(e.request.group, e.request.sample): e.completion for e in there},
        )

    def _leave(self, call: int) -> None:
        """Takes a call's traces away, and its requests where it was left early."""
        if self._outstanding[call] and self._engine is not None:
            self._engine.abort(call)
        del self._outstanding[call]
        self._mail.pop(call, None)
        if self._engine is not None and not self._outstanding and not self._engine.failed:
            self._engine.drain()  # a step launched before its rows had ended

    def _end_phase(self, phase: _Phase) -> None:
        self.metrics = phase.metrics(self._version, self._weight_sync_s)
        self.totals.add(self.metrics)
        self._weight_sync_s = 0.0

    # Weights

    @property
    def policy_version(self) -> int:
        """How many weight exchanges there have been."""
        return self._version

    def exchange(self, learner: nn.Module, *, kv: Literal["recompute", "keep"] = "recompute") -> ExchangeReport:
        """Takes over `learner`'s weights, in place, as the next policy version.

        The step in flight is collected first, so no forward reads weights while they change. All cached prefixes are
        forgotten. Running requests go on under the new version.

        Args:
            learner: the model given at the start, or one with the same parameters.
            kv: whether running requests compute their keys and values again, or keep those of the old weights.

        Returns:
            What was shared, what was copied, and the seconds it took.

        Raises:
            ValueError: a tensor is missing, extra or of another shape. The old version is whole and goes on.
            RuntimeError: reading the learner's weights failed half-way. Nothing is generated until an exchange succeeds.
        """
        if kv not in ("recompute", "keep"):
            raise ValueError(f"kv must be 'recompute' or 'keep', not {kv!r}")
        engine = self._open()
        start_s = time.perf_counter()
        self._deliver(engine.drain())
        report = self._exchange.exchange(learner)
        self._version += 1
        engine.publish_weights(self._version, keep_kv=kv == "keep")
        seconds = time.perf_counter() - start_s
        self._weight_sync_s += seconds
        self.totals.add_exchange(seconds, self._version)
        return report

    # Life

    @property
    def engine(self) -> Engine:
        """The engine, for those who look inside: addresses, captures, counters."""
        return self._open()

    def as_rollout_func(self, **options: Any) -> Callable[..., dict[str, Any]]:
        """This worker as TRL's `rollout_func`; options are those of `rollout.integrations.trl.rollout_func`."""
        from rollout.integrations.trl import rollout_func

        function: Callable[..., dict[str, Any]] = rollout_func(self, **options)
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


class _Phase:
    """Where the engine's sums stood when a call began."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.start_s = time.perf_counter()
        self.engine_before = copy.copy(engine.counters)
        self.scheduler_before = copy.copy(engine.scheduler.counters)
        self.lengths: list[int] = []

    def metrics(self, version: int, weight_sync_s: float) -> PhaseMetrics:
        now, before = self.engine.scheduler.counters, self.scheduler_before
        steps = self.engine.counters.since(self.engine_before)
        return PhaseMetrics(
            generate_s=time.perf_counter() - self.start_s,
            generated_tokens=now.generated_tokens - before.generated_tokens,
            prefill_tokens=now.prefill_tokens - before.prefill_tokens,
            completion_lengths=tuple(self.lengths),
            decode_steps=steps.decode_steps,
            prefill_steps=steps.prefill_steps,
            decode_s=steps.decode_s,
            prefill_s=steps.prefill_s,
            busy_s=steps.busy_s,
            span_s=steps.busy_s + steps.idle_s,
            row_steps=steps.row_steps,
            row_capacity=steps.row_capacity,
            block_steps=steps.block_steps,
            block_capacity=steps.block_capacity,
            dropped_tokens=now.dropped_tokens - before.dropped_tokens,
            graph_captures_total=self.engine.graphs.captures,
            preemptions_total=now.preemptions,
            policy_version=version,
            weight_sync_s=weight_sync_s,
        )


def _requests(prompts: Prompts, params: Params, call: int) -> list[Request]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(params)} SamplingParams: give one, or one for each prompt")
    fresh = int.from_bytes(os.urandom(8), "little")
    occurrences: Counter[tuple[int, ...]] = Counter()
    requests = []
    for group, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        ids = tuple(int(i) for i in prompt)
        for sample in range(p.n):
            key = random_key(fresh if p.seed is None else p.seed, ids, occurrences[ids])
            occurrences[ids] += 1
            requests.append(Request(ids, p, key, group=group, sample=sample, call=call))
    return requests


def random_key(seed: int, prompt_ids: tuple[int, ...], occurrence: int) -> tuple[int, int]:
    """Two int32 that key a completion's random numbers.

    They depend on what is asked alone: the seed, the prompt, and which of the call's samples of this prompt it is. So a
    completion is the same whoever shares its batch.
    """
    text = struct.pack("<Qq", seed & (2**64 - 1), occurrence) + np.asarray(prompt_ids, np.int64).tobytes()
    return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())


def _engine_dtype(parameter: torch.Tensor) -> torch.dtype:
    on_cuda = parameter.device.type == "cuda"
    return torch.bfloat16 if on_cuda and parameter.dtype == torch.float32 else parameter.dtype


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
