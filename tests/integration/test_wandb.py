"""What a run writes to Weights & Biases, read back from the files of an offline run."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from rollout import EngineConfig
from rollout.integrations.trl import RolloutGRPOTrainer
from rollout.observe import Timeline
from tests.integration.tiny_trl import arguments, prompts, share_of_digits, tiny_tokenizer
from tests.tiny_models import tiny

NAMES = (
    *("generated_tok_s", "prefill_tok_s", "generate_s", "gpu_idle_frac", "row_occupancy", "kv_util", "dropped_tokens"),
    *("graph_captures_total", "preemptions_total", "policy_version", "generated_tokens", "prefill_tokens"),
    *("completion_length_p50", "completion_length_p90", "completion_length_p99"),
)
STEPS = 4


def records(data: bytes) -> Iterator[Record]:
    """The records of a `.wandb` file: LevelDB's log format, 32 KiB blocks with chunks of records, after a header."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no room for a chunk's header: the block is padded
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order, once the run's last record is there: `finish` doesn't wait for it."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline_s = time.monotonic() + 30
    while (found := list(records(file.read_bytes())))[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline_s, "the offline run never ended"
        time.sleep(0.05)
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of four steps that logs every second one has left its files. W&B keeps its first folder for good."""
    folder = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MODE": "offline", "DIR": str(folder), "SILENT": "true", "PROJECT": "test"}.items():
            patch.setenv(f"WANDB_{name}", value)
        trainer = RolloutGRPOTrainer(
            model=tiny("llama"),
            reward_funcs=share_of_digits,
            args=arguments(folder / "out", report_to="wandb", max_steps=STEPS, logging_steps=2),
            train_dataset=prompts(),
            processing_class=tiny_tokenizer(),
            engine_config=EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20),
            timeline=Timeline(),
        )
        with trainer.rollout_worker:
            trainer.train()
        wandb.finish()
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of its history."""
    return history(folder)


def test_an_offline_run_holds_every_metric(rows: list[dict[str, Any]]) -> None:
    logs = [row for row in rows if "train/reward" in row]
    assert [row["train/global_step"] for row in logs] == [2, 4]
    for row in logs:
        values = {name: row[f"train/rollout/{name}"] for name in NAMES}  # a name that is missing raises
        assert all(isinstance(value, (int, float)) for value in values.values())
        assert 0 <= values["gpu_idle_frac"] <= 1
        assert 0 < values["row_occupancy"] <= 1
        assert 0 < values["kv_util"] <= 1
        assert values["policy_version"] == row["train/global_step"]  # the last one, not a mean
        assert values["generated_tokens"] == pytest.approx(16 * row["train/completions/mean_length"])  # of two phases
        assert values["generated_tok_s"] == pytest.approx(values["generated_tokens"] / values["generate_s"])
        assert values["completion_length_p50"] <= values["completion_length_p99"] <= 12
        assert row["train/perf/weight_sync_s"] > 0
        assert row["train/time/learner_s"] > 0
    # How long a phase took is TRL's own measure as well, logged as it happens.
    assert sum("profiling/Time taken: RolloutGRPOTrainer.rollout.generate" in row for row in rows) == STEPS
    assert not any("vLLM" in key for row in rows for key in row)


def test_an_offline_run_holds_tables_histograms_and_texts(rows: list[dict[str, Any]], folder: Path) -> None:
    phases = [row for row in rows if "rollout/phases/nrows" in row]
    assert [row["train/global_step"] for row in phases] == [1, 2, 3, 4]
    for row in phases:
        assert sum(row["rollout/completion_lengths/values"]) == 8
    (media,) = folder.glob("wandb/offline-run-*/files/media/table/rollout")
    tables = {kind: [json.loads(f.read_text()) for f in media.glob(f"{kind}*.json")] for kind in ("phases", "samples")}
    (columns,) = {tuple(table["columns"]) for table in tables["phases"]}
    seen = [dict(zip(columns, line, strict=True)) for table in tables["phases"] for line in table["data"]]
    assert sorted(line["step"] for line in seen) == [1, 2, 3, 4]  # each phase once
    for line in seen:
        assert line["completions"] == 8
        assert line["finished_eos"] + line["finished_length"] == 8
        assert line["versions"] == f"{line['policy_version']}: {line['generated_tokens']}"
        assert line["decode_s"] + line["tail_busy_s"] > 0
        assert line["decode_mbu"] is None  # a CPU's bandwidth isn't known
    texts = [line for table in tables["samples"] for line in table["data"]]
    assert len(texts) == 2 * 4
    assert all(line[2].endswith("=") and isinstance(line[3], str) for line in texts)
    kinds = {"image-file", "html-file"}  # PNG where matplotlib is installed
    assert all(row["rollout/timeline/_type"] in kinds for row in phases)
    (media,) = folder.glob("wandb/offline-run-*/files/media")
    pictures = [f for f in media.rglob("*") if f.is_file() and f.name.startswith("timeline")]
    assert len(pictures) == 4
    assert all(f.read_bytes().startswith((b"\x89PNG", b"<svg")) for f in pictures)
