"""GRPO on two processes with gloo: a group split across them, metrics added up over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.observe.records import read_phases

ROOT = Path(__file__).resolve().parents[2]


def test_a_group_split_across_two_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__]
    run = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    # Six completions of three prompts over two ranks: the second prompt has one on each, drawn differently.
    assert [len(set(rank["prompts"])) for rank in ranks] == [2, 2]
    assert ranks[0]["prompts"][2] == ranks[1]["prompts"][0]
    assert ranks[0]["completions"][2] != ranks[1]["completions"][0]

    (entry,) = ranks[0]["log"]
    assert entry["sampling/sampling_logp_difference/max"] < 1e-4
    assert entry["rollout/generated_tokens"] == pytest.approx(6 * entry["completions/mean_length"])
    assert entry["rollout/generated_tokens"] == sum(rank["tokens"] for rank in ranks)
    assert entry["rollout/generate_s"] == pytest.approx(max(rank["generate_s"] for rank in ranks))
    assert entry["rollout/policy_version"] == 1

    (phase,) = read_phases(tmp_path)  # one line, from the first rank, of both
    assert (phase["ranks"], phase["completions"], phase["step"]) == (2, 6, 1)
    assert phase["generated_tokens"] == phase["versions"]["1"] == entry["rollout/generated_tokens"]
    assert sum(phase["finish_reasons"].values()) == 6
    assert phase["reward"] == pytest.approx(entry["reward"], rel=1e-4)
    assert ranks[0]["weight"] == ranks[1]["weight"]  # they have learnt the same


def process(folder: Path) -> None:
    """What each of the two processes runs."""
    from rollout.integrations.trl import RolloutGRPOTrainer
    from tests.integration.tiny_trl import arguments, prompts, share_of_digits, tiny_tokenizer
    from tests.tiny_models import tiny

    seen: dict[str, list[str]] = {}

    def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        seen.update(prompts=list(prompts), completions=list(completions))
        return share_of_digits(completions)

    trainer = RolloutGRPOTrainer(
        model=tiny("llama"),
        reward_funcs=reward,
        args=arguments(folder, per_device_train_batch_size=3, num_generations=2, max_steps=1),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        log_dir=folder,
    )
    trainer.train()
    totals = trainer.rollout_worker.totals
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(
        json.dumps(
            {
                **seen,
                "tokens": totals.generated_tokens,
                "generate_s": totals.generate_s,
                "weight": float(next(trainer.model.parameters()).double().sum()),
                "log": [entry for entry in trainer.state.log_history if "reward" in entry],
            }
        )
    )
    trainer.rollout_worker.close()
    trainer.accelerator.end_training()  # else the process group's threads may abort a process that ends


if __name__ == "__main__":
    process(Path(sys.argv[1]))
