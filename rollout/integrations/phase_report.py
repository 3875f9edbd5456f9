"""What a phase leaves behind beside the trainer's scalars: a JSON line, and in W&B a table row, a histogram and texts.

Owns gathering it from all ranks and writing it on the first. Refuses to cost anything where nobody asked: without a
directory and without W&B among `report_to`, nothing is kept, gathered or imported.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from rollout.observe.breakdown import Breakdown
from rollout.observe.metrics import PhaseMetrics
from rollout.observe.picture import picture
from rollout.observe.records import PhaseWriter, phase_record
from rollout.observe.scene import Scene
from rollout.observe.timeline import Timeline
from rollout.types import Completion, MemoryReport
from rollout.worker import RolloutWorker

SAMPLES = 2
"""Completions a phase shown as text."""


@dataclass(slots=True)
class _Notes:
    """A rank's phases since the last flush."""

    metrics: list[PhaseMetrics] = field(default_factory=list)
    breakdown: Breakdown = field(default_factory=Breakdown)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    samples: list[Completion] = field(default_factory=list)
    since_s: float = -math.inf
    """When the last of them began or before, by the timeline's clock."""


class PhaseReport:
    """Keeps what phases did until a flush, then writes it.

    Args:
        trainer: whose log this lies beside.
        worker: whose phases they are.
        log_dir: where rollout.jsonl goes; None: nowhere.
    """

    def __init__(self, trainer: Any, worker: RolloutWorker, log_dir: str | Path | None = None) -> None:
        self._trainer = trainer
        self._worker = worker
        first = trainer.accelerator.process_index == 0
        self._writer = PhaseWriter(log_dir) if log_dir and first else None
        self._wandb = _WandbLog(trainer) if first and "wandb" in _report_to(trainer) else None
        self._wanted = bool(log_dir) or "wandb" in _report_to(trainer)  # the same on every rank
        self._here = _Notes()
        recorder = getattr(worker.engine, "recorder", None)
        self._timeline = recorder if isinstance(recorder, Timeline) and recorder.enabled else None
        self._ended_s = -math.inf  # when the phase before did

    def add(self, completions: Sequence[Completion], memory: MemoryReport | None) -> None:
        """A phase of this rank has ended: its metrics are the worker's.

        Args:
            completions: all of them.
            memory: the engine's, while it generated.
        """
        if not self._wanted:
            return
        notes = self._here
        notes.metrics.append(self._worker.metrics)
        notes.breakdown += self._worker.breakdown
        notes.memory_bytes = {} if memory is None else asdict(memory)
        notes.samples = list(completions[:SAMPLES])
        if self._timeline is not None:
            notes.since_s, self._ended_s = self._ended_s, self._timeline.clock()
        for completion in completions:
            notes.finish_reasons[completion.finish_reason] += 1
            for version, tokens in completion.versions:
                notes.versions[version] += tokens

    def flush(self, mode: str) -> None:
        """Writes the phases since the last flush as one. A collective, as the trainer's own log is."""
        notes, self._here = self._here, _Notes()
        if not notes.metrics:
            return
        metrics = PhaseMetrics.merge(notes.metrics)
        ranks = [(metrics, notes.finish_reasons, notes.versions)]
        if self._trainer.accelerator.num_processes > 1:
            ranks = gather_object(ranks)
        if self._writer is None and self._wandb is None:
            return
        metrics = PhaseMetrics.merge([of for of, _, _ in ranks], concurrent=True)
        rewards = self._trainer._metrics[mode].get("reward")
        record = phase_record(
            metrics,
            notes.breakdown,
            step=self._trainer.state.global_step,
            mode=mode,
            finish_reasons=sum((reasons for _, reasons, _ in ranks), Counter[str]()),
            versions=sum((versions for _, _, versions in ranks), Counter[int]()),
            memory_bytes=notes.memory_bytes,
            reward=rewards[-1] if rewards else None,
            ranks=len(ranks),
        )
        if self._writer is not None:
            self._writer.write(record)
        if self._wandb is not None:
            self._wandb.log(record, metrics.completion_lengths, notes.samples, self._timeline, notes.since_s)


class _WandbLog:
    """A phase in the W&B run that is active, if one is."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._run: Any = None
        self._phases: Any = None
        self._samples: Any = None

    def log(
        self,
        record: Mapping[str, Any],
        lengths: Sequence[int],
        samples: Sequence[Completion],
        timeline: Timeline | None,
        since_s: float,
    ) -> None:
        """Adds a row to the table of phases, the lengths' histogram, and a few completions as text.

        Where a timeline is kept, its picture too, of the phase since `since_s`.
        """
        try:
            import wandb
        except ImportError:
            return
        if wandb.run is None or wandb.run.disabled:
            return
        row = _row(record)
        if self._run is not wandb.run:
            self._run = wandb.run
            self._phases = wandb.Table(columns=list(row), log_mode="INCREMENTAL")
            columns = ["step", "mode", "prompt", "completion", "tokens", "finish_reason", "policy_version"]
            self._samples = wandb.Table(columns=columns, log_mode="INCREMENTAL")
        self._phases.add_data(*row.values())
        decode = self._trainer.processing_class.decode
        for one in samples:
            texts = (decode(list(one.prompt_ids)), decode(one.token_ids))
            self._samples.add_data(
                record["step"], record["mode"], *texts, len(one.token_ids), one.finish_reason, one.max_version
            )
        values = {
            "rollout/phases": self._phases,
            "rollout/samples": self._samples,
            "rollout/completion_lengths": wandb.Histogram(np_histogram=np.histogram(lengths, bins=64)),
            "train/global_step": record["step"],
        }
        with tempfile.TemporaryDirectory() as folder:  # W&B takes the file as it logs
            if timeline is not None:
                scene = _picture(record, timeline, since_s)
                if importlib.util.find_spec("matplotlib"):
                    values["rollout/timeline"] = wandb.Image(str(scene.write(Path(folder) / "timeline.png")))
                else:
                    values["rollout/timeline"] = wandb.Html(scene.to_svg(), inject=False)
            wandb.log(values)


def _picture(record: Mapping[str, Any], timeline: Timeline, since_s: float) -> Scene:
    """Of the phase since `since_s`, or of as much of its end as the timeline holds."""
    whole = not timeline.overwritten or timeline.spans_s("compute")[0, 0] < since_s
    title = f"step {record['step']}: {record['completions']:,} completions, {record['generated_tokens']:,} tokens"
    return picture([("the phase" if whole else "the phase's end", timeline)], title=title, since_s=since_s)


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A phase as flat columns, the same ones each time."""
    names = ("step", "mode", "reward", "completions", "generated_tokens", "generate_s", "generated_tok_s")
    reasons = record["finish_reasons"]
    return {
        **{name: record[name] for name in names},
        **{f"length_{name}": record["lengths"].get(name) for name in ("mean", "p50", "p90", "p99", "max")},
        **{f"finished_{name}": reasons.get(name, 0) for name in ("eos", "stop", "length")},
        **{name: record[name] for name in ("gpu_idle_frac", "decode_mbu", "decode_mfu", "row_occupancy", "kv_util")},
        "policy_version": record["policy_version"],
        "versions": ", ".join(f"{version}: {tokens}" for version, tokens in record["versions"].items()),
        **{f"{name}_s": seconds for name, seconds in record["seconds"].items()},
    }


def _report_to(trainer: Any) -> Sequence[str]:
    names: str | Sequence[str] | None = getattr(trainer.args, "report_to", None)
    return (names,) if isinstance(names, str) else names or ()
