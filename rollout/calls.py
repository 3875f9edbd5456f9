"""A call of the worker: prompts become requests with random keys, and the engine's sums a phase's metrics."""

from __future__ import annotations

import copy
import hashlib
import os
import struct
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rollout.engine.engine import Engine
from rollout.observe.metrics import PhaseMetrics
from rollout.types import Request, SamplingParams

Prompts = Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


def make_requests(prompts: Prompts, params: Params, call: int) -> list[Request]:
    """One request for each completion that a call asks for.

    Args:
        prompts: token ids of each prompt.
        params: one for all, or one for each prompt; None: the defaults.
        call: marks them.

    Raises:
        ValueError: as many params as prompts, or one, are needed.
    """
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


class PhaseMeter:
    """Where the engine's sums stood when a call began, and the lengths of what ended since."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.start_s = time.perf_counter()
        self.engine_before = copy.copy(engine.counters)
        self.scheduler_before = copy.copy(engine.scheduler.counters)
        self.lengths: list[int] = []

    def metrics(self, version: int, weight_sync_s: float) -> PhaseMetrics:
        """The phase until now. What several calls did together counts in each of them."""
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
