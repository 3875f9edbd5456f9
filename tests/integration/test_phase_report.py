"""What a phase leaves behind: one JSON line from the first rank, nothing where nobody asked, and the run's own file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import EngineConfig
from rollout.integrations import phase_report
from rollout.integrations.phase_report import PhaseReport
from rollout.integrations.trl import RolloutGRPOTrainer
from rollout.integrations.trl_backend import RolloutBackend
from rollout.observe.metrics import PhaseMetrics
from rollout.observe.records import read_phases
from rollout.observe.report import write_report
from rollout.types import Completion, MemoryReport, VersionRun
from tests.integration.tiny_trl import FakeWorker, arguments, fake_trainer, prompts, share_of_digits, tiny_tokenizer
from tests.tiny_models import tiny

LONG = Completion([5], [1, 2, 3], [-1.0] * 3, "length", (VersionRun(1, 1), VersionRun(2, 2)))
SHORT = Completion([5], [1], [-1.0], "eos", (VersionRun(2, 1),))
MEMORY = MemoryReport(
    kv_bytes=7, kv_blocks=2, weights_own_bytes=0, weights_shared_bytes=3, graphs_bytes=0, slots_bytes=1, free_bytes=9
)


def worker_after(lengths: tuple[int, ...], generate_s: float = 2.0) -> FakeWorker:
    worker = FakeWorker()
    worker.metrics = PhaseMetrics(
        generate_s=generate_s, generated_tokens=sum(lengths), completion_lengths=lengths, policy_version=2
    )
    return worker


def test_phases_between_two_flushes_make_one_line(tmp_path: Path) -> None:
    trainer = fake_trainer()
    report = PhaseReport(trainer, worker_after((3, 1)), tmp_path)
    report.add([LONG, SHORT], MEMORY)
    report.add([LONG, SHORT], MEMORY)
    trainer.state.global_step = 4
    trainer._metrics["train"]["reward"] = [0.1, 0.7]
    report.flush("train")
    report.flush("train")  # nothing new
    (phase,) = read_phases(tmp_path)
    assert (phase["step"], phase["reward"], phase["ranks"]) == (4, 0.7, 1)
    assert (phase["generated_tokens"], phase["generated_tok_s"], phase["completions"]) == (8, 2.0, 4)
    assert phase["finish_reasons"] == {"eos": 2, "length": 2}
    assert phase["versions"] == {"1": 2, "2": 6}
    assert phase["memory_bytes"]["kv_bytes"] == 7
    assert (phase["seconds"]["decode"], phase["seconds"]["learner"]) == (2.0, 4.0)


def test_ranks_are_gathered_and_the_first_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = (PhaseMetrics(generate_s=4.0, generated_tokens=4), Counter({"stop": 1}), Counter({2: 4}))
    asked: list[list] = []

    def gather(mine: list) -> list:
        asked.append(mine)
        return [*mine, slower]

    monkeypatch.setattr(phase_report, "gather_object", gather)
    for rank in (0, 1):
        trainer = fake_trainer(accelerator=SimpleNamespace(process_index=rank, num_processes=2))
        report = PhaseReport(trainer, worker_after((3, 1)), tmp_path / str(rank))
        report.add([LONG, SHORT], MEMORY)
        report.flush("train")
    assert len(asked) == 2  # a collective: both take part
    (phase,) = read_phases(tmp_path / "0")
    assert (phase["generated_tok_s"], phase["ranks"]) == (2.0, 2)
    assert phase["finish_reasons"] == {"eos": 1, "length": 1, "stop": 1}
    assert phase["versions"] == {"1": 1, "2": 7}
    assert not (tmp_path / "1").exists()


def test_nothing_is_kept_gathered_or_imported_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fake_trainer(accelerator=SimpleNamespace(process_index=0, num_processes=2), args={"report_to": ["none"]})
    monkeypatch.setattr(phase_report, "gather_object", lambda mine: pytest.fail("gathered"))
    report = PhaseReport(trainer, worker_after((3, 1)))
    report.add([LONG, SHORT], MEMORY)
    assert report._here.metrics == []
    report.flush("train")


@pytest.mark.parametrize(
    "module",  # any use but asking for the run raises
    [None, SimpleNamespace(run=None), SimpleNamespace(run=SimpleNamespace(disabled=True))],
    ids=["not installed", "no run", "disabled"],
)
def test_wandb_that_is_missing_or_off_costs_nothing(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    trainer = fake_trainer(args={"report_to": ["wandb"]})
    monkeypatch.setitem(sys.modules, "wandb", module)
    report = PhaseReport(trainer, worker_after((3, 1)))
    report.add([LONG, SHORT], MEMORY)
    report.flush("train")  # and nothing raised
    assert report._here.metrics == []


def test_a_broken_disk_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        RolloutBackend(fake_trainer(), FakeWorker(), tmp_path / "file")


def test_a_run_writes_its_phases_and_becomes_a_page(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainer = RolloutGRPOTrainer(
        model=tiny("llama"),
        reward_funcs=share_of_digits,
        args=arguments(tmp_path / "out", max_steps=3),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        engine_config=EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20),
        log_dir=tmp_path / "run",
    )
    with trainer.rollout_worker as worker:
        trainer.train()
        phases = read_phases(tmp_path / "run")
        assert sum(phase["generated_tokens"] for phase in phases) == worker.totals.generated_tokens
        total = worker.total_breakdown
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [phase["step"] for phase in phases] == [1, 2, 3]
    assert [phase["reward"] for phase in phases] == pytest.approx([log["reward"] for log in logs], rel=1e-4)
    for phase, log in zip(phases, logs, strict=True):
        assert sum(phase["finish_reasons"].values()) == phase["completions"] == 8
        assert phase["versions"] == {str(phase["policy_version"]): phase["generated_tokens"]}
        assert phase["memory_bytes"]["kv_bytes"] > 0  # while it generated
        assert phase["seconds"]["wake"] > 0
        assert log["time/decode_s"] == pytest.approx(phase["seconds"]["decode"], rel=1e-4)
    assert sum(sum(phase["seconds"].values()) for phase in phases) == pytest.approx(total.wall_s, rel=1e-4)
    assert "3 phases of training" in write_report(tmp_path / "run").read_text()
