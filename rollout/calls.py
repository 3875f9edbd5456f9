"""A call of the worker: prompts become requests with random keys, and the engine's sums a phase's metrics."""

from __future__ import annotations

import copy
import hashlib
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rollout.engine.engine import Engine
from rollout.engine.scheduler import Scheduler
from rollout.observe.cost import ModelCost, decode_positions, peak
from rollout.observe.metrics import PhaseMetrics
from rollout.observe.progress import PhaseProgress
from rollout.types import Completion, Request, SamplingParams

Prompts = Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


def make_requests(prompts: Prompts, params: Params, call: int) -> list[Request]:
    """One request for each completion that a call asks for.

    Args:
        prompts: token ids of each prompt.
        params: one for all, or one for each prompt; None: the defaults.
        call: marks them.

    Raises:
        ValueError: as many params as prompts, or one, are needed; or a prompt isn't a list of token ids.
    """
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(params)} SamplingParams: give one, or one for each prompt")
    fresh = int.from_bytes(os.urandom(8), "little")
    occurrences: Counter[tuple[int, ...]] = Counter()
    requests = []
    for group, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        given: object = prompt
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ValueError(
                f"prompt {group} is {prompt!r}: give a list of prompts, each of them a list of token ids, as "
                'tokenizer(texts)["input_ids"] is'
            )
        ids = tuple(int(i) for i in prompt)
        for sample in range(p.n):
            key = random_key(fresh if p.seed is None else p.seed, ids, occurrences[ids])
            occurrences[ids] += 1
            requests.append(Request(ids, p, key, group=group, sample=sample, call=call))
    return requests


def random_key(seed: int, prompt_ids: tuple[int, ...], occurrence: int) -> tuple[int, int]:
    """Two int32 that key a completion's random numbers.

    They depend on what is asked alone: the seed, the prompt, and which of the call's samples of this prompt it is, and
    not on who shares its batch.
    """
    text = struct.pack("<Qq", seed & (2**64 - 1), occurrence) + np.asarray(prompt_ids, np.int64).tobytes()
    return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())


class PhaseMeter:
    """Where the engine's sums stood when a call began, and the lengths of what ended since."""

    def __init__(self, engine: Engine, cost: ModelCost | None = None) -> None:
        self.engine = engine
        self.cost = cost
        self.decode_positions = 0
        self.start_s = time.perf_counter()
        self.engine_before = copy.copy(engine.counters)
        self.scheduler_before = copy.copy(engine.scheduler.counters)
        self.lengths: list[int] = []

    def ended(self, completion: Completion) -> None:
        """A completion of the call has ended."""
        self.lengths.append(len(completion.token_ids))
        self.decode_positions += decode_positions(len(completion.prompt_ids), len(completion.token_ids))

    def metrics(self, version: int, weight_sync_s: float) -> PhaseMetrics:
        """The phase until now. What several calls did together counts in each of them."""
        now, before = self.engine.scheduler.counters, self.scheduler_before
        steps = self.engine.counters.since(self.engine_before)
        cost, positions = self.cost, self.decode_positions
        decoded = sum(max(0, length - 1) for length in self.lengths)  # the prompt's step gives the first token
        bytes_s, flops_s = peak(device_name(self.engine.device))
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
            graph_captures_total=self.engine.steps.graphs.captures,
            preemptions_total=now.preemptions,
            policy_version=version,
            weight_sync_s=weight_sync_s,
            decode_bytes=cost.decode_bytes(steps.decode_steps, positions) if cost else 0,
            decode_flops=cost.flops(decoded, positions) if cost else 0,
            peak_bytes_s=bytes_s,
            peak_flops_s=flops_s,
        )


def device_name(device: torch.device) -> str:
    """What its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def model_cost(engine: Engine) -> ModelCost | None:
    """The engine's model in numbers; None where experts or sliding windows make a step's cost depend on more."""
    module: Any = engine.module
    config, shape = module.config.get_text_config(decoder=True), engine.shape
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        return None
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return None
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return None
    head = module.get_output_embeddings()
    if head is None:
        return None
    table, head = module.get_input_embeddings().weight, head.weight
    parameters = sum(p.numel() for p in module.parameters())
    return ModelCost(
        num_layers=shape.num_layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        matmul_params=parameters if table is head else parameters - table.numel(),
        dtype_bytes=engine.dtype.itemsize,
        wider_bytes=head.numel() * (head.dtype.itemsize - engine.dtype.itemsize),
        kv_dtype_bytes=engine.kv.element_size(),
    )


class CallProgress:
    """A call's progress line: reads the engine's state, at the pace that the line is shown."""

    def __init__(self, engine: Engine, phase: PhaseMeter, completions: int) -> None:
        self._engine = engine
        self._phase = phase
        self._line = PhaseProgress(completions)

    def stepped(self) -> None:
        """A step was made."""
        if self._line.due():
            scheduler = self._engine.scheduler
            self._line.show(
                len(self._phase.lengths),
                self._tokens,
                rows=scheduler.rows.num_live / scheduler.rows.max_rows,
                kv=scheduler.blocks.used / scheduler.blocks.capacity,
                tokens_left=tokens_left(scheduler),
            )

    def close(self) -> None:
        """The call has ended."""
        self._line.close(len(self._phase.lengths), self._tokens)

    @property
    def _tokens(self) -> int:
        return self._engine.scheduler.counters.generated_tokens - self._phase.scheduler_before.generated_tokens


def tokens_left(scheduler: Scheduler) -> int:
    """Tokens that running and waiting sequences are expected to make yet, up to whole blocks."""
    rows = scheduler.rows
    live = np.flatnonzero(rows.occupied)
    waiting = [(len(s.request.prompt_ids), s.token_ids.size, s.request.params.max_tokens) for s in scheduler.waiting]
    prompt, made, most = np.asarray(waiting, np.int32).reshape(-1, 3).T
    generated = np.concatenate([rows.num_tokens[live], made])
    known = np.concatenate([rows.prompt_length[live], prompt]) + generated
    limit = np.concatenate([rows.limit[live], prompt + most])
    expected = scheduler.lengths.blocks(known, generated, limit) * scheduler.block_size
    return int(np.maximum(np.minimum(expected, limit) - known, 0).sum())
