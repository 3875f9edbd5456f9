"""GRPO with TRL on tiny models, rollout generating: a few steps of everything that a run may turn on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from rollout import EngineConfig, RolloutWorker
from rollout.integrations.trl import RolloutGRPOTrainer, attach
from rollout.observe import progress
from rollout.types import Completion
from tests.integration.tiny_trl import arguments, prompts, share_of_digits, tiny_tokenizer
from tests.tiny_models import fingerprint, tiny

DIFFERENCE = "sampling/sampling_logp_difference/max"
SMALL = EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20)
"""Fewer rows than a phase has completions, so that rows are used again."""

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a trainer, by default with rollout inside; its worker is closed in the end."""
    torch.set_num_threads(1)
    made: list[Any] = []

    def make(
        cls: type = RolloutGRPOTrainer, *, model: Any = None, data: Any = None, own: dict | None = None, **changes: Any
    ) -> Any:
        own = {"engine_config": SMALL, **(own or {})} if cls is RolloutGRPOTrainer else own or {}
        trainer = cls(
            model=tiny("llama") if model is None else model,
            args=arguments(tmp_path, **changes),
            train_dataset=prompts() if data is None else data,
            processing_class=tiny_tokenizer(),
            **{"reward_funcs": share_of_digits, **own},
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        if worker := getattr(trainer, "rollout_worker", None):
            worker.close()


def steps(trainer: Any) -> list[dict[str, float]]:
    """What was logged at each training step."""
    return [entry for entry in trainer.state.log_history if "reward" in entry]


# A run


@pytest.mark.parametrize(("architecture", "chat"), [("llama", False), ("qwen2", True)])
def test_trains_with_logprobs_that_are_the_learners_own(make: Make, architecture: str, chat: bool) -> None:
    trainer = make(model=tiny(architecture), data=prompts(chat=chat))
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert len(steps(trainer)) == 2
    for number, entry in enumerate(steps(trainer), 1):
        assert entry[DIFFERENCE] < 1e-4
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert entry["rollout/policy_version"] == number
        assert entry["rollout/generated_tokens"] == 8 * entry["completions/mean_length"]
        assert entry["rollout/generated_tok_s"] == pytest.approx(
            entry["rollout/generated_tokens"] / entry["rollout/generate_s"]
        )
    after = trainer.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert "profiling/Time taken: RolloutGRPOTrainer.vLLM.generate" not in steps(trainer)[0]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_head_that_trl_casts_is_float32_in_the_engine(make: Make, architecture: str) -> None:
    trainer = make(model=tiny(architecture).to(torch.bfloat16), cast_lm_head_to_fp32=True, learning_rate=1e-2)
    engine = trainer.rollout_worker.engine
    assert engine.module.lm_head.weight.dtype == torch.float32
    assert engine.module.model.norm.weight.dtype == engine.dtype == torch.bfloat16
    assert (engine.module.lm_head.weight is engine.module.model.embed_tokens.weight) == (architecture == "qwen2")
    trainer.train()
    assert [entry["rollout/policy_version"] for entry in steps(trainer)] == [1, 2]
    assert all(0 < entry[DIFFERENCE] < 0.05 for entry in steps(trainer))


def test_a_groups_prompt_is_prefilled_once(make: Make) -> None:
    trainer = make(max_steps=1)
    asked: list[Any] = []
    generate = trainer.rollout_worker.generate
    trainer.rollout_worker.generate = lambda p, s: asked.append((p, [x.n for x in s])) or generate(p, s)
    trainer.train()
    ((distinct, counts),) = asked
    assert counts == [4, 4]
    assert len(set(distinct)) == 2


def test_the_correction_weighs_with_the_sampled_logprobs(make: Make) -> None:
    trainer = make(max_steps=1)
    generate = trainer.rollout_worker.generate

    def half_a_nat_off(*asked: Any) -> list[list[Completion]]:
        groups = generate(*asked)
        return [[replace(c, logprobs=[x - 0.5 for x in c.logprobs]) for c in group] for group in groups]

    trainer.rollout_worker.generate = half_a_nat_off
    trainer.train()
    (entry,) = steps(trainer)
    assert entry["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5, abs=1e-4)
    assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(0.5), rel=1e-3)


# Weights


@pytest.mark.parametrize("synced", [True, False])
def test_an_engine_with_weights_of_its_own_follows_the_learner(make: Make, synced: bool) -> None:
    trainer = make(own={"engine_config": replace(SMALL, dtype=torch.bfloat16)}, max_steps=3, learning_rate=1e-2)
    if not synced:  # from weights that stay what they were
        exchange, stale = trainer.rollout_worker.exchange, copy.deepcopy(trainer.model)
        trainer.rollout_worker.exchange = lambda _: exchange(stale)
    trainer.train()
    differences = [entry[DIFFERENCE] for entry in steps(trainer)]
    assert differences[0] < 0.1  # rounding to bfloat16
    assert (differences[-1] < 0.1) is synced


@pytest.mark.parametrize("engine_dtype", [None, torch.bfloat16])
def test_the_learner_has_the_memory_while_it_trains(make: Make, engine_dtype: torch.dtype | None) -> None:
    held: list[int] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        held.append(trainer.rollout_worker.memory_report().kv_bytes)
        return [float(len(c)) for c in completions]

    trainer = make(own={"engine_config": replace(SMALL, dtype=engine_dtype), "reward_funcs": reward}, max_steps=2)
    assert trainer.rollout_worker.asleep
    trainer.train()
    assert held == [0, 0]
    assert trainer.rollout_worker.switches.wakes == 2
    assert all(0.0 < entry["perf/wake_s"] < 60.0 for entry in steps(trainer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_phase_leaves_the_learner_as_it_was(make: Make, dtype: torch.dtype, checkpointing: bool) -> None:
    trainer = make(model=tiny("llama").to(dtype), gradient_checkpointing=checkpointing)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
    before = fingerprint(trainer.model)
    trainer.vllm_generation.sync_weights()
    _, ids, logprobs, _ = trainer.vllm_generation.generate([[9, 10], [9, 10], [11]], None, 2)
    assert fingerprint(trainer.model) == before
    assert [len(x) for x in ids] == [len(x) for x in logprobs]
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {dtype}
    assert trainer.model.training
    assert trainer.model.config._attn_implementation == before["configs"][0][1]


def test_lora_is_merged_into_the_engine_and_never_into_the_learner(make: Make) -> None:
    lora = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make(own={"peft_config": lora}, max_steps=3, learning_rate=3e-2)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert all(entry[DIFFERENCE] < 1e-4 for entry in steps(trainer))
    assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base)
    lora_b = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]
    assert min(p.abs().max() for p in lora_b) > 1e-2  # it has learnt, so that merging made a difference


# Schedules


@pytest.mark.parametrize(
    ("changes", "phases", "exchanges"),
    [
        ({}, 4, 4),
        ({"num_iterations": 2}, 2, 2),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, 2, 2),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}, 1, 1),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 8, 4),
        ({"gradient_accumulation_steps": 2}, 4, 4),
    ],
)
def test_phases_and_exchanges_follow_trls_schedule(make: Make, changes: dict, phases: int, exchanges: int) -> None:
    trainer = make(max_steps=4, **changes)
    trainer.train()
    totals = trainer.rollout_worker.totals
    assert (totals.phases, totals.exchanges) == (phases, exchanges)
    assert len(steps(trainer)) == phases if phases < 8 else 4
    generated = sum(entry["rollout/generated_tokens"] for entry in steps(trainer))
    assert generated == totals.generated_tokens


def test_each_phase_draws_anew_and_a_run_can_be_repeated(make: Make) -> None:
    def run() -> list[str]:
        seen: list[str] = []
        trainer = make(
            own={"reward_funcs": lambda completions, **_: seen.extend(completions) or [1.0] * len(completions)},
            data=prompts(2),
            max_steps=3,
            learning_rate=0.0,
        )
        trainer.train()
        return seen

    first = run()
    assert first == run()
    assert len(set(first)) > 20  # of 24, all from the same two prompts and the same weights


def test_a_resumed_run_generates_what_the_whole_run_did(make: Make) -> None:
    def run(**kwargs: Any) -> dict[int, list[str]]:
        seen: dict[int, list[str]] = {}

        def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
            seen[trainer_state.global_step] = list(completions)
            return share_of_digits(completions)

        trainer = make(own={"reward_funcs": reward}, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train(**kwargs)
        return seen

    whole = run()
    rest = run(resume_from_checkpoint=True)  # checkpoint-4 is the last one: nothing is left to do
    assert rest == {}
    folder = next(Path(make(max_steps=1).args.output_dir).glob("checkpoint-2"))
    assert run(resume_from_checkpoint=str(folder)) == {step: whole[step] for step in (2, 3)}


def test_evaluation_between_steps(make: Make) -> None:
    modes: list[tuple[bool, int]] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        modes.append((trainer.model.training, len(completions)))
        return share_of_digits(completions)

    trainer = make(
        own={"reward_funcs": reward, "eval_dataset": prompts(4)},
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
    )
    trainer.evaluate()
    trainer.train()
    assert modes == [(False, 4)] * 2 + [(True, 8), *[(False, 4)] * 2] * 2
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2  # training starts a log of its own
    for entry in evaluations:
        assert entry[f"eval_{DIFFERENCE}"] < 1e-4
        assert entry["eval_rollout/generated_tokens"] == pytest.approx(8 * entry["eval_completions/mean_length"])
    # Evaluating at a step and training at it share an exchange: steps 0, 1 and 2, and once more where training starts.
    assert trainer.rollout_worker.totals.exchanges == 4


def test_evaluation_does_not_change_what_training_draws(make: Make) -> None:
    def run(**changes: Any) -> list[float]:
        trainer = make(own={"eval_dataset": prompts(4)}, per_device_eval_batch_size=4, **changes)
        trainer.train()
        return [entry["reward"] for entry in steps(trainer)]

    assert run() == run(eval_strategy="steps", eval_steps=1)


def test_filters_are_warned_of_and_logged(make: Make) -> None:
    with pytest.warns(UserWarning, match="kept probability mass"):
        trainer = make(top_k=5, max_steps=1)
    trainer.train()
    (entry,) = steps(trainer)
    assert 0 < entry["rollout/kept_mass_mean"] < 0.9


# Other ways in


def test_attach_to_a_trainer_that_exists(make: Make) -> None:
    trainer = make(GRPOTrainer)
    with attach(trainer, engine_config=SMALL) as worker:
        assert trainer.vllm_generation.worker is worker
        trainer.train()
        assert worker.totals.phases == 2
    assert all(entry[DIFFERENCE] < 1e-4 for entry in steps(trainer))


def test_attach_a_worker_that_exists(make: Make) -> None:
    model = tiny("llama")
    with RolloutWorker(model, SMALL) as worker:
        trainer = make(own={"worker": worker, "engine_config": None}, model=model)
        assert trainer.rollout_worker is worker
        trainer.train()
        assert worker.totals.phases == 2


@pytest.mark.parametrize("silent", [False, True])
def test_a_phases_progress_is_shown_unless_the_trainer_shows_none(
    make: Make, silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_S", 0.0)
    make(max_steps=1, disable_tqdm=silent).train()
    ends = [line for line in capsys.readouterr().err.splitlines() if line.startswith("generated: 8/8 completions")]
    assert len(ends) == (0 if silent else 1)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("chat", [False, True])
def test_rollout_func(make: Make, chat: bool, tmp_path: Path) -> None:
    model = tiny("llama")
    with RolloutWorker(model, SMALL) as worker:
        function = worker.as_rollout_func(log_dir=tmp_path / "log")
        own = {"rollout_func": function, "eval_dataset": prompts(4, chat=chat)}
        trainer = make(GRPOTrainer, model=model, data=prompts(chat=chat), own=own, per_device_eval_batch_size=4)
        trainer.train()
        trainer.evaluate()
        assert worker.totals.exchanges == 3
    assert (tmp_path / "log" / "rollout.jsonl").is_file()
    assert [entry["rollout/policy_version"] for entry in steps(trainer)] == [1, 2]
    assert DIFFERENCE not in steps(trainer)[0]  # this way in has no correction


# Refused


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"max_completion_length": 64}, "max_completion_length=64 leaves no room"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, "vespo"),
    ],
)
def test_arguments_that_cannot_be_met(make: Make, changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(**changes)


def test_trainers_that_cannot_be_served(make: Make) -> None:
    trainer = make()
    with pytest.raises(ValueError, match="attached already"):
        attach(trainer)
    with pytest.raises(ValueError, match="GRPOTrainer"):
        attach(object())  # type: ignore[arg-type]
    plain = make(GRPOTrainer)
    with pytest.raises(ValueError, match="engine_config"):
        attach(plain, trainer.rollout_worker, SMALL)
    plain.rollout_func = lambda prompts, trainer: {}
    with pytest.raises(ValueError, match="rollout_func"):
        attach(plain)


def test_a_moved_part_of_trl_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(GRPOTrainer)
    tokenless = copy.copy(plain)
    del tokenless.eos_token_ids
    with pytest.raises(RuntimeError, match=r"has no eos_token_ids.*Install"):
        attach(tokenless)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self: self.backend.generate())
    with pytest.raises(RuntimeError, match=r"1\.16\.0.*vllm_generation in _generate_single_turn"):
        attach(plain)


def test_long_completions_with_a_sequence_ratio_are_warned_of(make: Make) -> None:
    with pytest.warns(UserWarning, match="token_truncate"):
        make(
            model=tiny("llama", max_position_embeddings=2048),
            own={"engine_config": replace(SMALL, max_model_len=2048)},
            vllm_importance_sampling_mode="sequence_mask",
            max_completion_length=1024,
        )
