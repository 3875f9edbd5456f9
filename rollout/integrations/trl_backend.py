"""What stands where TRL's vLLM client would: prompts in TRL's order in, completions in the same order out.

Owns the way of one phase: which weights, random numbers and sampling parameters, repeated prompts gathered into groups,
and what is logged. Refuses to plug itself in, and to know which trainers can be (`rollout.integrations.trl`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from rollout.integrations.phase_report import PhaseReport
from rollout.observe.breakdown import Breakdown
from rollout.observe.metrics import PhaseMetrics
from rollout.types import Completion, SamplingParams
from rollout.worker import RolloutWorker

_OVERRIDES = {
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_token_ids": "stop_token_ids",
    "seed": "seed",
}
"""`GRPOConfig.generation_kwargs` that mean something here, and the field of `SamplingParams` they set."""
_NO_OPS = {"do_sample": True, "repetition_penalty": 1.0, "use_cache": True, "num_beams": 1}
"""Those that are accepted with this value only, for it asks for what happens anyway."""


def sampling_params(trainer: Any) -> SamplingParams:
    """The trainer's arguments as `SamplingParams` for one completion.

    `seed` is the base of every phase's seed: `args.seed`, or `generation_kwargs["seed"]`.

    Raises:
        ValueError: an argument can't be met; the message names it.
    """
    if trainer.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty={trainer.repetition_penalty} isn't supported, for the learner's logprobs don't know "
            "of it: leave it at 1.0"
        )
    if trainer.temperature <= 0:
        raise ValueError(f"temperature={trainer.temperature}: the trainer divides logits by it, so it must be above 0")
    if getattr(trainer.args, "vllm_structured_outputs_regex", None):
        raise ValueError("vllm_structured_outputs_regex isn't supported: leave it unset")
    params = {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "seed": trainer.args.seed,
    }
    for name, value in (trainer.args.generation_kwargs or {}).items():
        if name in _OVERRIDES:
            if value is not None:  # transformers' way to leave a setting alone
                params[_OVERRIDES[name]] = value
        elif name not in _NO_OPS or value != _NO_OPS[name]:
            raise ValueError(
                f"generation_kwargs[{name!r}]={value!r} isn't supported. These are: {', '.join(_OVERRIDES)}; "
                "set temperature and the like as arguments of GRPOConfig"
            )
    return SamplingParams(**params)


def phase_seed(seed: int, mode: str, global_step: int, index: int, process_index: int) -> int:
    """A seed for the `index`-th phase begun at this step, in [0, 2**63).

    It depends on where the run stands and not on how it came there: a run resumed at a step draws what the run that was
    never interrupted would have drawn. Evaluation has seeds of its own, so that it doesn't shift training's.
    """
    text = struct.pack("<qqqq", seed, global_step, index, process_index) + mode.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generate_in_order(
    worker: RolloutWorker, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Completion]:
    """One completion for each prompt, in the order given; equal prompts share one prefill.

    Args:
        prompts: token ids, with repetitions in any number and order.
        params: for one completion; `n` is set here.
    """
    places: dict[tuple[int, ...], list[int]] = {}  # each distinct prompt, and where it stands in `prompts`
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    groups = worker.generate(list(places), [replace(params, n=len(at)) for at in places.values()])
    completions: list[Completion | None] = [None] * len(prompts)
    for at, group in zip(places.values(), groups, strict=True):
        for place, completion in zip(at, group, strict=True):
            completions[place] = completion
    return [_whole(completion) for completion in completions]


def _whole(completion: Completion | None) -> Completion:
    if completion is None or completion.finish_reason == "aborted" or not completion.token_ids:
        raise RuntimeError(f"the worker gave no whole completion ({completion}): nothing can be learnt from it")
    return completion


class RolloutBackend:
    """A worker at a trainer's service. `sync_weights` and `generate` are what TRL calls on its vLLM client.

    Args:
        trainer: a `GRPOTrainer` that passed `rollout.integrations.trl`'s checks.
        worker: generates.
        log_dir: the first rank appends a line a phase to rollout.jsonl in it, for `python -m rollout.observe.report`.
    """

    def __init__(self, trainer: Any, worker: RolloutWorker, log_dir: str | Path | None = None) -> None:
        self.trainer = trainer
        self.worker = worker
        self._log = PhaseLog(trainer, worker)
        self._report = PhaseReport(trainer, worker, log_dir)
        self._synced_step = -1
        self._phases: dict[str, tuple[int, int]] = {}  # by mode: the global step, and phases begun at it
        trainer.add_callback(_Flush(self))
        sampling_params(trainer)  # a bad argument is an error now, not after a model was loaded and a batch tokenised

    @property
    def mode(self) -> str:
        """ "train" or "eval", as TRL tells them apart."""
        return "train" if self.trainer.model.training else "eval"

    def sync_weights(self) -> None:
        """Takes over the learner's weights, once for each global step; again where the engine gave its copy back."""
        step = self.trainer.state.global_step
        if step != self._synced_step or self.worker.needs_exchange:
            self.worker.exchange(self.trainer.model)
            self._synced_step = step

    def forget_sync(self) -> None:
        """The learner's weights may have changed without a step: the next phase exchanges them."""
        self._synced_step = self.trainer._last_loaded_step = -1

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """What `VLLMGeneration.generate` returns: prompt ids, completion ids, `logprobs[b][t][0]`, nothing.

        `num_generations` isn't needed: how often a prompt stands in `prompts` is how many samples it gets, also where a
        group is split across processes.
        """
        if images is not None and any(images):
            raise ValueError("images aren't supported: train on text, or leave generation to TRL")
        if profiler is not None:
            profiler.name = profiler.name.replace("vLLM.", "rollout.")
        with profiler or nullcontext():
            completions = self.run_phase(prompts)
        logprobs = [[[logprob] for logprob in completion.logprobs] for completion in completions]
        return [list(p) for p in prompts], [completion.token_ids for completion in completions], logprobs, None

    def run_phase(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """One phase: a completion for each prompt, in order. The learner isn't touched.

        The engine is awake for the phase alone; the learner has the memory before and after. Weights come first, so
        that the KV cache takes what they leave.
        """
        params = sampling_params(self.trainer)
        known = self.worker.config.eos_token_ids or ()
        ends = (i for i in self.trainer.eos_token_ids if i not in known)
        params = replace(
            params,
            seed=self._next_seed(params.seed),
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
        )
        self.sync_weights()  # TRL itself calls it once a step, and a step may have several phases
        memory = self.worker.wake()
        try:
            completions = generate_in_order(self.worker, prompts, params)
        finally:
            if not self.worker.engine.failed:
                self.worker.sleep()
        self._log.add(self.worker.metrics, completions)
        self._report.add(completions, memory)
        return completions

    def flush(self) -> None:
        """Puts the phases since the last call into the trainer's log. Every rank has to call it."""
        self._log.flush(self.mode)
        self._report.flush(self.mode)

    def _next_seed(self, seed: int | None) -> int:
        step, mode = self.trainer.state.global_step, self.mode
        at, begun = self._phases.get(mode, (step, 0))
        index = begun if at == step else 0
        self._phases[mode] = (step, index + 1)
        return phase_seed(seed or 0, mode, step, index, self.trainer.accelerator.process_index)


class PhaseLog:
    """Phases' metrics on their way into `trainer._metrics[mode]`, whence TRL logs them beside its own.

    TRL logs the mean of what is in a metric's list. Means of rates are wrong, and means of totals are too, so each list
    gets one value, made anew from all phases since the last log: rates are sums over sums, counts and seconds are sums,
    percentiles are over all completions, and what counts since the start (`…_total`, `policy_version`) is the last.
    Across ranks counts add up, and wall seconds are the slowest rank's; seconds of sleep and wake are this rank's last,
    and where the time went (`time/…`) is this rank's, added up over the phases.
    """

    def __init__(self, trainer: Any, worker: RolloutWorker) -> None:
        self._trainer = trainer
        self._worker = worker
        self._here: list[_Phase] = []  # this rank's, since the last flush
        self._since_log: dict[str, list[_Phase]] = {"train": [], "eval": []}
        self._time_here = Breakdown()
        self._time_since_log = {"train": Breakdown(), "eval": Breakdown()}

    def add(self, metrics: PhaseMetrics, completions: Sequence[Completion]) -> None:
        """A phase of this rank. Ranks may differ in how many they have: tool loops differ in their turns."""
        kept = [mass for completion in completions for mass in completion.kept_mass or ()]
        self._here.append((metrics, sum(kept), len(kept)))
        self._time_here += self._worker.breakdown

    def flush(self, mode: str) -> None:
        """Merges ranks, then phases, then writes. A collective: ranks that had a phase had it at the same step."""
        if not self._here:
            return
        ranks = [_merge(self._here)]
        self._here = []
        if self._trainer.accelerator.num_processes > 1:
            ranks = gather_object(ranks)
        lists, since = self._trainer._metrics[mode], self._since_log[mode]
        if "rollout/generate_s" not in lists:  # TRL cleared them: it has logged
            since.clear()
            self._time_since_log[mode] = Breakdown()
        self._time_since_log[mode] += self._time_here
        self._time_here = Breakdown()
        since.append(_merge(ranks, concurrent=True))
        metrics, kept_sum, kept_tokens = _merge(since)
        values = metrics.to_log() | self._worker.switches.to_log() | self._time_since_log[mode].to_log()
        if kept_tokens:
            values["rollout/kept_mass_mean"] = kept_sum / kept_tokens
        for name, value in values.items():
            lists[name] = [value]


_Phase = tuple[PhaseMetrics, float, int]
"""A phase's metrics, the sum of its tokens' kept mass, and how many tokens have one."""


def _merge(phases: Sequence[_Phase], *, concurrent: bool = False) -> _Phase:
    metrics, kept_sums, kept_tokens = zip(*phases, strict=True)
    return PhaseMetrics.merge(metrics, concurrent=concurrent), sum(kept_sums), sum(kept_tokens)


class _Flush(TrainerCallback):
    """Calls the backend where every rank passes, just before the trainer logs."""

    def __init__(self, backend: RolloutBackend) -> None:
        self._backend = backend

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._backend.flush()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._backend.flush()

    # A run begins with a checkpoint's weights, and may end with those of its best one: no step tells of either.
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._backend.forget_sync()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._backend.forget_sync()
