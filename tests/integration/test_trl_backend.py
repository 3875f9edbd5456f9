"""The parts of the TRL plug-in that decide: order, seeds, sampling parameters, what is logged. No model, no trainer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rollout.integrations import trl_backend
from rollout.integrations.trl_backend import (
    PhaseLog,
    RolloutBackend,
    generate_in_order,
    phase_seed,
    sampling_params,
)
from rollout.observe.metrics import PhaseMetrics
from rollout.types import Completion, SamplingParams, VersionRun
from tests.integration.tiny_trl import FakeWorker, fake_trainer

# Order


def test_repeated_prompts_are_asked_for_once_and_come_back_in_place() -> None:
    worker = FakeWorker()
    prompts = [[5, 1], [6], [5, 1], [7, 7, 7], [6], [5, 1]]
    completions = generate_in_order(worker, prompts, SamplingParams(max_tokens=9))
    ((asked, params),) = worker.asked
    assert asked == [(5, 1), (6,), (7, 7, 7)]
    assert [p.n for p in params] == [3, 2, 1]
    assert {p.max_tokens for p in params} == {9}
    assert [c.token_ids for c in completions] == [[5, 0], [6, 0], [5, 1], [7, 0], [6, 1], [5, 2]]


def test_any_order_of_any_counts_comes_back_in_place() -> None:
    rng = random.Random(0)
    prompts = [[token, 1] for token in range(3, 20) for _ in range(rng.randint(1, 5))]
    rng.shuffle(prompts)
    completions = generate_in_order(FakeWorker(), prompts, SamplingParams())
    assert [list(c.prompt_ids) for c in completions] == prompts
    assert len({tuple(c.token_ids) for c in completions}) == len(prompts)  # no sample stands in two places


@pytest.mark.parametrize(
    "bad",
    [
        Completion([5], [], [], "length", ()),
        Completion([5], [1], [-1.0], "aborted", (VersionRun(0, 1),)),
    ],
)
def test_nothing_partial_reaches_the_trainer(bad: Completion) -> None:
    class Broken(FakeWorker):
        def generate(self, prompts: object, params: object) -> list[list[Completion]]:
            return [[bad]]

    with pytest.raises(RuntimeError, match="no whole completion"):
        generate_in_order(Broken(), [[5]], SamplingParams())


# Seeds


def seeds_of(worker: FakeWorker) -> list[int | None]:
    return [params[0].seed for _, params in worker.asked]


def test_phases_steps_modes_and_processes_have_seeds_of_their_own() -> None:
    places = [
        (s, m, step, i, p) for s in (0, 1) for m in ("train", "eval") for step in (0, 1) for i in (0, 1) for p in (0, 1)
    ]
    assert len({phase_seed(*place) for place in places}) == len(places)
    assert all(0 <= phase_seed(*place) < 2**63 for place in places)


def test_a_resumed_run_goes_on_with_the_seeds_of_the_one_that_was_not_interrupted() -> None:
    def run(start: int, stop: int) -> list[int | None]:
        worker, trainer = FakeWorker(), fake_trainer()
        backend = RolloutBackend(trainer, worker)
        for step in range(start, stop):
            trainer.state.global_step = step
            backend.run_phase([[5]])
            backend.run_phase([[5]])  # two phases at one step, as with many accumulation steps
        return seeds_of(worker)

    whole = run(0, 4)
    assert len(set(whole)) == 8
    assert run(2, 4) == whole[4:]


def test_evaluation_does_not_shift_trainings_seeds() -> None:
    def run(evaluate: bool) -> list[int | None]:
        worker, trainer = FakeWorker(), fake_trainer()
        backend = RolloutBackend(trainer, worker)
        for training in (True, False, True) if evaluate else (True, True):
            trainer.model.training = training
            backend.run_phase([[5]])
        seeds = seeds_of(worker)
        return [seeds[0], seeds[-1]]

    assert run(True) == run(False)


def test_ranks_of_one_group_draw_differently() -> None:
    workers = []
    for rank in range(2):
        trainer, worker = fake_trainer(), FakeWorker()
        trainer.accelerator.process_index = rank
        RolloutBackend(trainer, worker).run_phase([[5], [5]])
        workers.append(worker)
    assert seeds_of(workers[0]) != seeds_of(workers[1])


# Sampling parameters


def test_sampling_follows_the_trainers_arguments() -> None:
    trainer = fake_trainer(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, max_completion_length=33)
    assert sampling_params(trainer) == SamplingParams(
        max_tokens=33, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, seed=7
    )


def test_generation_kwargs_override_and_no_ops_pass() -> None:
    kwargs = {"top_p": 0.5, "max_new_tokens": 4, "stop_token_ids": [9], "seed": 3, "do_sample": True, "num_beams": 1}
    params = sampling_params(fake_trainer(args={"generation_kwargs": kwargs}))
    assert (params.top_p, params.max_tokens, params.stop_token_ids, params.seed) == (0.5, 4, (9,), 3)
    unset = fake_trainer(args={"generation_kwargs": dict.fromkeys(("top_p", "top_k", "seed"))})
    assert sampling_params(unset) == sampling_params(fake_trainer()), "None leaves a setting alone"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temperature": 0.0}, "temperature"),
        ({"args": {"generation_kwargs": {"temperature": 0.5}}}, "temperature"),
        ({"args": {"generation_kwargs": {"num_beams": 4}}}, "num_beams"),
        ({"args": {"generation_kwargs": {"do_sample": False}}}, "do_sample"),
        ({"args": {"generation_kwargs": {"suppress_tokens": [1]}}}, "suppress_tokens"),
        ({"args": {"vllm_structured_outputs_regex": "a+"}}, "vllm_structured_outputs_regex"),
    ],
)
def test_an_argument_that_cannot_be_met_is_named_at_once(changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RolloutBackend(fake_trainer(**changes), FakeWorker())


def test_the_trainers_ends_are_stop_ids_where_the_worker_lacks_them() -> None:
    worker = FakeWorker(eos_token_ids=(2,))
    RolloutBackend(fake_trainer(eos_token_ids=[2, 4]), worker).run_phase([[5]])
    assert worker.asked[0][1][0].stop_token_ids == (4,)


# Weights


def test_weights_are_exchanged_once_a_step() -> None:
    worker, trainer = FakeWorker(), fake_trainer()
    backend = RolloutBackend(trainer, worker)
    for step in (0, 0, 1, 1, 3):
        trainer.state.global_step = step
        backend.sync_weights()
    assert worker.exchanged == [trainer.model] * 3
    backend.forget_sync()
    backend.sync_weights()
    assert len(worker.exchanged) == 4
    assert trainer._last_loaded_step == -1


def test_memory_is_the_engines_for_the_phase_alone() -> None:
    worker, trainer = FakeWorker(), fake_trainer()
    backend = RolloutBackend(trainer, worker)
    backend.sync_weights()
    backend.generate([[5], [6]], None, 1)
    assert worker.calls == ["exchange", "wake", "generate", "sleep"], "weights come before KV takes what is left"
    worker.calls.clear()
    worker.needs_exchange = True  # its own copy went with the memory
    backend.generate([[5], [6]], None, 1)
    assert worker.calls == ["exchange", "wake", "generate", "sleep"], "although the step is the same"
    backend.flush()
    assert trainer._metrics["train"]["perf/sleep_s"] == [0.25]


def test_a_phase_that_breaks_gives_the_memory_back_unless_the_engine_failed() -> None:
    class Broken(FakeWorker):
        def generate(self, prompts: object, params: object) -> list[list[Completion]]:
            raise OSError("broken")

    for failed, calls in ((False, ["exchange", "wake", "sleep"]), (True, ["exchange", "wake"])):
        worker = Broken()
        worker.engine.failed = failed
        with pytest.raises(OSError, match="broken"):
            RolloutBackend(fake_trainer(), worker).generate([[5]], None, 1)
        assert worker.calls == calls


def test_images_are_refused() -> None:
    backend = RolloutBackend(fake_trainer(), FakeWorker())
    with pytest.raises(ValueError, match="images"):
        backend.generate([[5]], [["picture"]], 1)
    assert backend.generate([[5], [5]], None, 2) == ([[5], [5]], [[5, 0], [5, 1]], [[[-1.0], [-1.0]]] * 2, None)


# What is logged

FAST = PhaseMetrics(
    generate_s=1.0, generated_tokens=300, policy_version=1, preemptions_total=2, completion_lengths=(3,)
)
SLOW = PhaseMetrics(
    generate_s=3.0, generated_tokens=100, policy_version=2, preemptions_total=5, completion_lengths=(9,)
)


def test_phases_between_two_logs_make_one_value_each() -> None:
    trainer = fake_trainer()
    log, lists = PhaseLog(trainer, FakeWorker()), trainer._metrics["train"]
    for metrics in (FAST, SLOW):
        log.add(metrics, [])
        log.flush("train")
    assert lists["rollout/generated_tok_s"] == [100.0]  # 400 tokens in 4 s, not the mean of 300 and 33
    assert lists["rollout/generated_tokens"] == [400.0]
    assert lists["rollout/generate_s"] == [4.0]
    assert lists["rollout/policy_version"] == [2.0]
    assert lists["rollout/preemptions_total"] == [5.0]
    assert lists["rollout/completion_length_p99"] == [9.0]
    lists.clear()  # as TRL does after a log
    log.add(SLOW, [])
    log.flush("train")
    assert lists["rollout/generated_tokens"] == [100.0]
    log.flush("train")  # nothing new
    assert lists["rollout/generated_tokens"] == [100.0]
    assert trainer._metrics["eval"] == {}


def test_ranks_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fake_trainer()
    trainer.accelerator.num_processes = 2
    monkeypatch.setattr(trl_backend, "gather_object", lambda mine: [*mine, (SLOW, 0.0, 0)])
    log, lists = PhaseLog(trainer, FakeWorker()), trainer._metrics["train"]
    log.add(FAST, [])
    log.flush("train")
    assert lists["rollout/generated_tok_s"] == [pytest.approx(400 / 3)]
    assert lists["rollout/generate_s"] == [3.0]
    assert lists["rollout/preemptions_total"] == [7.0]


def test_kept_mass_is_a_mean_over_tokens() -> None:
    trainer = fake_trainer()
    log = PhaseLog(trainer, FakeWorker())
    one = Completion([5], [1, 2], [-1.0, -1.0], "length", (VersionRun(0, 2),), kept_mass=[0.5, 0.7])
    log.add(FAST, [one, replace(one, token_ids=[1], logprobs=[-1.0], kept_mass=[0.9])])
    log.flush("train")
    assert trainer._metrics["train"]["rollout/kept_mass_mean"] == [pytest.approx(0.7)]
