"""A phase in numbers: raw counts and seconds, the rates made of them, and the names they are logged under.

Counts and seconds are kept, rates are derived, so that phases and ranks add up without averaging averages. Refuses to
measure anything itself. A rate with nothing to divide by is NaN, and NaN is never logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout.observe.cost import bandwidth_share, flop_share

LENGTH_PERCENTILES = (50, 90, 99)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _idle_frac(busy_s: float, span_s: float) -> float:
    """Clamped: device clocks are mapped to the host's, and rounding may put the busy time a hair over the span."""
    return min(1.0, max(0.0, 1.0 - busy_s / span_s)) if span_s > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMetrics:
    """What one phase of generation did. Every field is a count or seconds; every property is derived from them."""

    generate_s: float = 0.0
    """Wall seconds from the call to its last completion."""
    generated_tokens: int = 0
    """Sampled tokens that a completion holds."""
    prefill_tokens: int = 0
    """Tokens computed in prefill steps: prompts once a group, and again what a preempted sequence had."""
    completion_lengths: tuple[int, ...] = ()
    """Tokens in each completion, in any order."""
    decode_steps: int = 0
    """Steps of one token a row."""
    prefill_steps: int = 0
    """Steps over chunks of prompts."""
    decode_s: float = 0.0
    """Seconds of decode steps on the device, start to end of each, added up."""
    prefill_s: float = 0.0
    """Seconds of prefill steps on the device, start to end of each, added up."""
    busy_s: float = 0.0
    """Seconds in which at least one step ran on the compute stream."""
    span_s: float = 0.0
    """Seconds from the first step's start to the last step's end on the compute stream."""
    row_steps: int = 0
    """Rows that decoded, summed over decode steps. Padding rows don't count."""
    row_capacity: int = 0
    """`max_rows` summed over decode steps."""
    block_steps: int = 0
    """KV blocks in use, summed over all steps."""
    block_capacity: int = 0
    """All KV blocks, summed over all steps. Their number may change from phase to phase."""
    dropped_tokens: int = 0
    """Tokens sampled in this phase for sequences that had already ended, and thrown away."""
    graph_captures_total: int = 0
    """CUDA graphs captured since the engine was made."""
    preemptions_total: int = 0
    """Sequences put back for want of blocks since the engine was made."""
    policy_version: int = 0
    """Weight exchanges up to the phase's end."""
    weight_sync_s: float = 0.0
    """Seconds of the weight exchanges since the phase before."""
    decode_bytes: int = 0
    """What decode steps had to read, see `rollout.observe.cost`. 0: not known for this model."""
    decode_flops: int = 0
    """What decode steps had to compute. 0: not known."""
    peak_bytes_s: float = 0.0
    """The memory's bandwidth, as the GPU's maker gives it. 0: not known for this GPU."""
    peak_flops_s: float = 0.0
    """Dense bfloat16 operations a second, as the GPU's maker gives them. 0: not known."""

    @property
    def completions(self) -> int:
        """Completions that ended in this phase."""
        return len(self.completion_lengths)

    @property
    def generated_tok_s(self) -> float:
        """Generated tokens a wall second of the phase, prefill included in the seconds."""
        return _ratio(self.generated_tokens, self.generate_s)

    @property
    def prefill_tok_s(self) -> float:
        """Prefill tokens a second of prefill steps on the device. A phase is mostly decode: wall time hides them."""
        return _ratio(self.prefill_tokens, self.prefill_s)

    @property
    def decode_step_s(self) -> float:
        """Mean seconds of a decode step on the device."""
        return _ratio(self.decode_s, self.decode_steps)

    @property
    def gpu_idle_frac(self) -> float:
        """Share of `span_s` in which no step ran on the compute stream, in [0, 1]."""
        return _idle_frac(self.busy_s, self.span_s)

    @property
    def row_occupancy(self) -> float:
        """Rows that decoded / `max_rows`, mean over decode steps."""
        return _ratio(self.row_steps, self.row_capacity)

    @property
    def kv_util(self) -> float:
        """KV blocks in use / all blocks, mean over steps."""
        return _ratio(self.block_steps, self.block_capacity)

    @property
    def decode_read_tb_s(self) -> float:
        """Terabytes a second that decode steps had to read, while they ran."""
        return _ratio(self.decode_bytes / 1e12, self.decode_s) if self.decode_bytes else math.nan

    @property
    def decode_mbu(self) -> float:
        """Share of the memory's bandwidth that decode steps used, while they ran."""
        return bandwidth_share(self.decode_bytes, self.decode_s, self.peak_bytes_s) if self.decode_bytes else math.nan

    @property
    def decode_mfu(self) -> float:
        """Share of the GPU's operations a second that decode steps used, while they ran."""
        return flop_share(self.decode_flops, self.decode_s, self.peak_flops_s) if self.decode_flops else math.nan

    def length_percentile(self, percent: float) -> float:
        """The smallest length that at least `percent` of the completions don't exceed: a length that occurred."""
        if not self.completion_lengths:
            return math.nan
        return float(np.percentile(self.completion_lengths, percent, method="inverted_cdf"))

    def to_log(self) -> dict[str, float]:
        """Names and values for a trainer's log, as plain floats. What this phase can't tell (NaN) is left out."""
        values = {
            "rollout/generated_tok_s": self.generated_tok_s,
            "rollout/prefill_tok_s": self.prefill_tok_s,
            "rollout/generate_s": self.generate_s,
            "rollout/gpu_idle_frac": self.gpu_idle_frac,
            "rollout/row_occupancy": self.row_occupancy,
            "rollout/kv_util": self.kv_util,
            "rollout/graph_captures_total": self.graph_captures_total,
            "rollout/preemptions_total": self.preemptions_total,
            "rollout/dropped_tokens": self.dropped_tokens,
            "rollout/policy_version": self.policy_version,
            "rollout/generated_tokens": self.generated_tokens,
            "rollout/prefill_tokens": self.prefill_tokens,
            **{f"rollout/completion_length_p{p}": self.length_percentile(p) for p in LENGTH_PERCENTILES},
            "perf/weight_sync_s": self.weight_sync_s,
            "perf/decode_read_tb_s": self.decode_read_tb_s,
            "perf/decode_mbu": self.decode_mbu,
            "perf/decode_mfu": self.decode_mfu,
        }
        return {name: float(value) for name, value in values.items() if not math.isnan(value)}

    @staticmethod
    def merge(parts: Sequence[PhaseMetrics], *, concurrent: bool = False) -> PhaseMetrics:
        """Add several up; rates follow from the sums.

        Args:
            parts: in order of time, if one came after the other.
            concurrent: False, phases one after the other: seconds add up, and what counts since the engine was made
                is the last one's. True, ranks at the same time: wall seconds are the slowest one's, and what counts
                since their engines were made adds up. Device seconds and capacities add up in both, so that idle share,
                occupancy and utilisation are means weighted by them.

        Raises:
            ValueError: nothing to merge.
        """
        if not parts:
            raise ValueError("merge needs at least one PhaseMetrics")
        wall, counter = (max, sum) if concurrent else (sum, _last)
        return PhaseMetrics(
            generate_s=float(wall([p.generate_s for p in parts])),
            generated_tokens=sum(p.generated_tokens for p in parts),
            prefill_tokens=sum(p.prefill_tokens for p in parts),
            completion_lengths=tuple(length for p in parts for length in p.completion_lengths),
            decode_steps=sum(p.decode_steps for p in parts),
            prefill_steps=sum(p.prefill_steps for p in parts),
            decode_s=sum(p.decode_s for p in parts),
            prefill_s=sum(p.prefill_s for p in parts),
            busy_s=sum(p.busy_s for p in parts),
            span_s=sum(p.span_s for p in parts),
            row_steps=sum(p.row_steps for p in parts),
            row_capacity=sum(p.row_capacity for p in parts),
            block_steps=sum(p.block_steps for p in parts),
            block_capacity=sum(p.block_capacity for p in parts),
            dropped_tokens=sum(p.dropped_tokens for p in parts),
            graph_captures_total=counter([p.graph_captures_total for p in parts]),
            preemptions_total=counter([p.preemptions_total for p in parts]),
            policy_version=max(p.policy_version for p in parts),
            weight_sync_s=float(wall([p.weight_sync_s for p in parts])),
            decode_bytes=sum(p.decode_bytes for p in parts),
            decode_flops=sum(p.decode_flops for p in parts),
            peak_bytes_s=max(p.peak_bytes_s for p in parts),
            peak_flops_s=max(p.peak_flops_s for p in parts),
        )


def _last(values: Sequence[int]) -> int:
    return values[-1]


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """A run's sums: `add` each phase, `add_exchange` each weight exchange. Its size doesn't grow with the run."""

    phases: int = 0
    completions: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    generate_s: float = 0.0
    busy_s: float = 0.0
    span_s: float = 0.0
    """Seconds between first start and last end within each phase, summed: the learner's time isn't idle time."""
    dropped_tokens: int = 0
    graph_captures: int = 0
    preemptions: int = 0
    exchanges: int = 0
    weight_sync_s: float = 0.0
    policy_version: int = 0

    def add(self, phase: PhaseMetrics) -> None:
        """Count one phase in. Its `weight_sync_s` is left to `add_exchange`."""
        self.phases += 1
        self.completions += phase.completions
        self.generated_tokens += phase.generated_tokens
        self.prefill_tokens += phase.prefill_tokens
        self.generate_s += phase.generate_s
        self.busy_s += phase.busy_s
        self.span_s += phase.span_s
        self.dropped_tokens += phase.dropped_tokens
        self.graph_captures = phase.graph_captures_total
        self.preemptions = phase.preemptions_total
        self.policy_version = max(self.policy_version, phase.policy_version)

    def add_exchange(self, seconds: float, policy_version: int) -> None:
        """Count one weight exchange in, and the version it published."""
        self.exchanges += 1
        self.weight_sync_s += seconds
        self.policy_version = max(self.policy_version, policy_version)

    @property
    def generated_tok_s(self) -> float:
        """Generated tokens a second of the phases' wall time."""
        return _ratio(self.generated_tokens, self.generate_s)

    @property
    def gpu_idle_frac(self) -> float:
        """Share of the phases' compute span without a step on the compute stream, in [0, 1]."""
        return _idle_frac(self.busy_s, self.span_s)

    @property
    def mean_length(self) -> float:
        """Mean tokens a completion."""
        return _ratio(self.generated_tokens, self.completions)


def format_summary(totals: RunTotals) -> str:
    """A run's totals as a two-column table for a terminal, one line each, without a newline at the end."""

    def number(value: float, form: str, unit: str = "") -> str:
        return "-" if math.isnan(value) else f"{value:{form}}{unit}"

    rows = [
        ("phases", number(totals.phases, ",")),
        ("completions", number(totals.completions, ",")),
        ("tokens generated", number(totals.generated_tokens, ",")),
        ("mean completion length", number(totals.mean_length, ",.1f", " tokens")),
        ("generating", number(totals.generate_s, ",.2f", " s")),
        ("throughput", number(totals.generated_tok_s, ",.1f", " tokens/s")),
        ("device idle", number(totals.gpu_idle_frac * 100, ".2f", " %")),
        ("prompt tokens computed", number(totals.prefill_tokens, ",")),
        ("tokens dropped", number(totals.dropped_tokens, ",")),
        ("preemptions", number(totals.preemptions, ",")),
        ("graph captures", number(totals.graph_captures, ",")),
        ("weight exchanges", number(totals.exchanges, ",")),
        ("exchanging weights", number(totals.weight_sync_s, ",.3f", " s")),
        ("policy version", number(totals.policy_version, ",")),
    ]
    left = max(len(name) for name, _ in rows)
    right = max(len(value.split(" ")[0]) for _, value in rows)
    lines = []
    for name, value in rows:
        figure, _, unit = value.partition(" ")
        lines.append(f"{name:<{left}}  {figure:>{right}} {unit}".rstrip())
    return "\n".join(lines)
