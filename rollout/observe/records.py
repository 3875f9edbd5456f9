"""A run's phases as JSON lines: `phase_record` makes one, `PhaseWriter` appends it, `read_phases` reads them back.

Owns the names in the file RUN_DIR/rollout.jsonl, which `rollout.observe.report` draws. Refuses to gather anything.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout.observe.breakdown import Breakdown
from rollout.observe.metrics import PhaseMetrics

FILE = "rollout.jsonl"
BINS = 24
_METRICS = (
    *("completions", "generated_tokens", "prefill_tokens", "generate_s", "generated_tok_s", "prefill_tok_s"),
    *("decode_steps", "prefill_steps", "gpu_idle_frac", "row_occupancy", "kv_util", "dropped_tokens"),
    *("preemptions_total", "graph_captures_total", "policy_version", "weight_sync_s"),
    *("decode_read_tb_s", "decode_mbu", "decode_mfu"),
)


def phase_record(
    metrics: PhaseMetrics,
    breakdown: Breakdown,
    *,
    step: int,
    mode: str = "train",
    finish_reasons: Mapping[str, int] | None = None,
    versions: Mapping[int, int] | None = None,
    memory_bytes: Mapping[str, int] | None = None,
    reward: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What is kept of a phase.

    Args:
        metrics: the phase's, of all ranks.
        breakdown: where wall time went since the phase before, on this rank.
        step: the trainer's global step.
        finish_reasons: completions by how they ended.
        versions: tokens by the policy version that sampled them.
        memory_bytes: of this rank's engine while it generated.
        reward: the completions' mean.
        more: further values that JSON can hold.

    Returns:
        A record that JSON can hold: NaN is None, and floats have six digits.
    """
    record: dict[str, Any] = _finite(
        {
            "step": step,
            "mode": mode,
            "unix_s": int(time.time()),
            "reward": reward,
            **{name: getattr(metrics, name) for name in _METRICS},
            "lengths": length_summary(metrics),
            "finish_reasons": dict(sorted((finish_reasons or {}).items())),
            "versions": {str(version): tokens for version, tokens in sorted((versions or {}).items())},
            "seconds": breakdown.parts(),
            "memory_bytes": dict(memory_bytes or {}),
            **more,
        }
    )
    return record


def length_summary(metrics: PhaseMetrics) -> dict[str, Any]:
    """Mean, percentiles and histogram of completions' lengths; `edges` are one more than `counts`."""
    lengths = np.asarray(metrics.completion_lengths, np.int64)
    if not lengths.size:
        return {}
    counts, edges = np.histogram(lengths, bins=min(BINS, max(1, int(np.ptp(lengths)))))
    percentiles = {f"p{p}": metrics.length_percentile(p) for p in (10, 50, 90, 99)}
    return {
        "mean": float(lengths.mean()),
        "min": int(lengths.min()),
        **percentiles,
        "max": int(lengths.max()),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }


class PhaseWriter:
    """Appends one line a phase to RUN_DIR/rollout.jsonl. One process of a run has one.

    Args:
        run_dir: made if it doesn't exist; a run that is resumed goes on in the same file.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")  # a run was killed in the middle of a line

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends what `phase_record` made."""
        line = json.dumps(record, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_phases(run_dir: str | Path) -> list[dict[str, Any]]:
    """A run's phases in order. Lines cut short are left out.

    Raises:
        ValueError: there is no file, or no phase in it.
    """
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise ValueError(f"there is no {path}: give the directory that the run's --rollout_log named")
    phases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            phases.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    if not phases:
        raise ValueError(f"{path} has no phase yet")
    return phases


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
