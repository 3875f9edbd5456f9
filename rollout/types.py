"""What is asked and what comes out: `SamplingParams`, `Request`, `Completion`, `MemoryReport`.

Everything here is immutable and knows nothing of devices. A sequence's progress lives in `rollout.engine`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["eos", "stop", "length", "aborted"]

_LEAST_TEMPERATURE = 1e-6  # below, logits over it may leave float32

MAX_STOP_IDS = 8
"""Stop ids a request may name beside end-of-sequence: they are compared in one vectorised pass a step."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn.

    Raises:
        ValueError: a value is out of its range.
    """

    n: int = 1
    """Completions for each prompt. Its prompt is prefilled once."""
    max_tokens: int = 16384
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """0 is greedy; its logprobs are those of temperature 1."""
    seed: int | None = 0
    """Keys the random numbers, together with the prompt and the sample's index. None: a fresh seed each call."""
    top_k: int = 0
    """Keep the k likeliest tokens. 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this. 1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one. 0: none."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion (the token is kept), beside the model's end-of-sequence."""
    ignore_eos: bool = False
    """Go on through the model's end-of-sequence tokens, as benchmarks do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        if self.seed is not None:
            try:
                object.__setattr__(self, "seed", operator.index(self.seed))
            except TypeError as error:
                raise ValueError(f"seed must be an integer or None, not {self.seed!r}") from error
        checks = (
            (self.n >= 1, f"n must be at least 1, not {self.n}"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (
                self.temperature == 0.0 or _LEAST_TEMPERATURE <= self.temperature < float("inf"),
                f"temperature must be 0 (greedy), or finite and at least {_LEAST_TEMPERATURE}, not {self.temperature}",
            ),
            (0 <= self.top_k < 1 << 31, f"top_k must be ≥ 0 (0 keeps all) and fit 31 bits, not {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must lie in (0, 1], not {self.top_p}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must lie in [0, 1], not {self.min_p}"),
            (
                len(self.stop_token_ids) <= MAX_STOP_IDS,
                f"stop_token_ids takes at most {MAX_STOP_IDS} ids, not {len(self.stop_token_ids)}",
            ),
            (
                all(0 <= i < 1 << 31 for i in self.stop_token_ids),
                f"stop_token_ids must be ≥ 0 and fit 31 bits: {self.stop_token_ids}",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    @property
    def filtered(self) -> bool:
        """Whether any of top-k, top-p and min-p narrows the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that was asked for: sample `sample` of prompt `group`."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: tuple[int, int]
    """Two int32 that key this sample's random numbers: a hash of seed, prompt and occurrence."""
    group: int = 0
    sample: int = 0
    call: int = 0
    """Which call of the worker asked, so that several can share the engine."""


class VersionRun(NamedTuple):
    """`tokens` consecutive tokens sampled under policy `version`."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What came out for one request."""

    prompt_ids: SequenceOf[int]
    token_ids: list[int]
    """The sampled tokens, the ending one (eos or stop) included."""
    logprobs: list[float]
    """Each sampled token's logprob under the full, temperature-scaled distribution, in nats."""
    finish_reason: FinishReason
    versions: tuple[VersionRun, ...]
    """Policy versions in order, as runs that add up to `len(token_ids)`."""
    kept_mass: list[float] | None = field(default=None, repr=False)
    """With top-k, top-p or min-p on: the probability, under the full distribution, of the tokens they kept."""

    @property
    def min_version(self) -> int:
        """The oldest policy version that sampled a token, -1 where none did."""
        return min((run.version for run in self.versions), default=-1)

    @property
    def max_version(self) -> int:
        """The newest policy version that sampled a token, -1 where none did."""
        return max((run.version for run in self.versions), default=-1)


class NonFiniteLogitsError(RuntimeError):
    """The model gave NaN or infinite logits for a request.

    `request` is the first one hit; `completions` are the ones of the same call that had ended, or had tokens, when
    the error was raised (`finish_reason` "aborted" for the latter), by (group, sample). Other calls go on.
    """

    def __init__(self, message: str, request: Request, completions: dict[tuple[int, int], Completion]) -> None:
        super().__init__(message)
        self.request = request
        self.completions = completions


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where an engine's memory is at one moment, in bytes of its device."""

    kv_bytes: int
    """Mapped for keys and values; 0 asleep."""
    kv_blocks: int
    """Blocks of the KV cache, the scratch block included; 0 asleep."""
    weights_own_bytes: int
    """Held by weights of the engine's own: copies of another dtype, merged adapters. Asleep, those that stay."""
    weights_shared_bytes: int
    """Weights that engine and learner share: the learner's memory, which the engine adds nothing to."""
    graphs_bytes: int
    """What the captures have taken: the graphs, their pool, and what kernels loaded for them."""
    slots_bytes: int
    """Input and output buffers, block table and rows' state."""
    free_bytes: int
    """What the device has left, for everybody. On a CPU, what the system calls available."""

    @property
    def held_bytes(self) -> int:
        """What the engine costs its device beyond shared weights."""
        return self.kv_bytes + self.weights_own_bytes + self.graphs_bytes + self.slots_bytes

    def __str__(self) -> str:
        parts = {
            f"KV ({self.kv_blocks} blocks)": self.kv_bytes,
            "own weights": self.weights_own_bytes,
            "graphs": self.graphs_bytes,
            "slots": self.slots_bytes,
            "held": self.held_bytes,
            "shared weights": self.weights_shared_bytes,
            "free": self.free_bytes,
        }
        return ", ".join(f"{name} {size / (1 << 30):.3f}" for name, size in parts.items()) + " GiB"
