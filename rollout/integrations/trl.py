"""rollout in TRL: `RolloutGRPOTrainer`, `attach` for a `GRPOTrainer` that exists, and `rollout_func`.

Owns the plugging in, and the checks before it: which trainers can be served, and that the private parts of TRL that are
relied on stand where they stood in the versions tested. Refuses image models, vLLM and paged generation beside itself,
and learners that are sharded or not on their device yet.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from rollout.config import EngineConfig
from rollout.integrations.trl_backend import RolloutBackend
from rollout.worker import RolloutWorker

TESTED_TRL = ("1.14.2", "1.16.0")
"""Versions of TRL whose private parts were read and tested against; the older is the last for Python 3.10."""

_ATTRIBUTES = (
    *("_is_vlm", "_metrics", "_tokenize_prompts", "accelerator", "add_callback", "args", "eos_token_ids", "loss_type"),
    *("max_completion_length", "min_p", "model", "repetition_penalty", "rollout_func", "state", "temperature", "tools"),
    *("top_k", "top_p", "use_transformers_continuous_batching", "use_vllm", "vllm_importance_sampling_correction"),
    *("vllm_importance_sampling_mode", "vllm_mode"),
)
"""What is read from a trainer."""
_CALLS = {
    "_generate_single_turn": {"use_vllm", "_last_loaded_step", "vllm_generation", "sync_weights", "generate"},
    "_generate": {"rollout_func", "_tokenize_prompts", "_generate_single_turn"},
    "_generate_and_score_completions": {"use_vllm", "vllm_importance_sampling_correction"},
    "log": {"_metrics"},
}
"""The trainer's methods that have to pass through the backend, and names that each then speaks of."""


class RolloutGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with rollout generating. Takes the same arguments, and four of its own.

    Importance-sampling correction is on as with vLLM (`vllm_importance_sampling_correction`); for long completions set
    `vllm_importance_sampling_mode="token_truncate"`.

    Args:
        engine_config: sizes and switches of the engine that is made here.
        worker: an engine that exists, made from this very model, instead.
        timeline: receives the engine's spans, see `rollout.observe.timeline`.
        log_dir: a line a phase goes to rollout.jsonl in it, for `python -m rollout.observe.report`.

    Raises:
        ValueError: an argument can't be met; the message says what to change.
        RuntimeError: this version of TRL is put together differently from those tested.
    """

    def __init__(
        self,
        *args: Any,
        engine_config: EngineConfig | None = None,
        worker: RolloutWorker | None = None,
        timeline: Any = None,
        log_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        config = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments.get("args")
        if config is not None:
            _check_no_other_backend(config.use_vllm, config.use_transformers_continuous_batching)
        super().__init__(*args, **kwargs)
        self.rollout_worker = attach(self, worker, engine_config, timeline=timeline, log_dir=log_dir)


def attach(
    trainer: GRPOTrainer,
    worker: RolloutWorker | None = None,
    engine_config: EngineConfig | None = None,
    *,
    timeline: Any = None,
    log_dir: str | Path | None = None,
) -> RolloutWorker:
    """Lets rollout generate for a `GRPOTrainer` that was made with `use_vllm=False`.

    The worker stands where TRL's vLLM client would, so that importance-sampling correction, `sampling/*` metrics,
    evaluation and tools work as with vLLM. Weights are exchanged once for each new global step. A worker made here
    shows a phase's progress unless the trainer's `disable_tqdm` is set.

    Args:
        trainer: not training yet.
        worker: made from the trainer's model. None: one is made, with the trainer's end-of-sequence ids.
        engine_config: for the worker made here. None: the defaults, with no more rows than a process's phase needs.
        timeline: for the worker made here.
        log_dir: a line a phase goes to rollout.jsonl in it, for `python -m rollout.observe.report`.

    Returns:
        The worker, which lives until its `close()`.

    Raises:
        ValueError: the trainer can't be served; the message says what to change.
        RuntimeError: this version of TRL is put together differently from those tested.
    """
    _check(trainer)
    if trainer.rollout_func is not None:
        raise ValueError("this trainer was given a rollout_func, which goes around the worker: leave it out")
    if worker is None:
        worker = _make_worker(trainer, engine_config, timeline)
    elif engine_config is not None or timeline is not None:
        raise ValueError(
            "engine_config and timeline are for the worker made here: give them to your own worker instead"
        )
    longest = worker.engine.max_model_len
    if trainer.max_completion_length >= longest:
        raise ValueError(
            f"max_completion_length={trainer.max_completion_length} leaves no room for a prompt in the engine's "
            f"max_model_len of {longest}: lower the one, or raise the other as far as the model's positions allow"
        )
    backend = RolloutBackend(trainer, worker, log_dir)
    # NOTE: "server" only keeps TRL from looking for a vLLM engine inside; no request leaves the process.
    trainer.vllm_generation, trainer.use_vllm, trainer.vllm_mode = backend, True, "server"
    trainer._last_loaded_step = -1
    _check_correction(trainer)
    worker.sleep()  # until the first phase, the learner has the memory
    return worker


def rollout_func(
    worker: RolloutWorker, *, log_dir: str | Path | None = None
) -> Callable[[list[Any], GRPOTrainer], dict[str, Any]]:
    """`worker` as TRL's `rollout_func=` argument; `RolloutWorker.as_rollout_func()` is the same.

    TRL calls this hook "experimental", and on this path it applies neither importance-sampling correction (the sampled
    logprobs are returned and go unused) nor tools: prefer `attach`. Weights are exchanged when the global step has
    moved on.

    Args:
        worker: made from the trainer's model.
        log_dir: a line a phase goes to rollout.jsonl in it, for `python -m rollout.observe.report`.
    """
    backend: RolloutBackend | None = None

    def generate(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        nonlocal backend
        if backend is None or backend.trainer is not trainer:
            _check(trainer)
            if trainer.tools:
                raise ValueError("tools don't reach a rollout_func: use rollout.integrations.trl.attach instead")
            backend = RolloutBackend(trainer, worker, log_dir)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("images aren't supported: train on text, or leave generation to TRL")
        completions = backend.run_phase(prompt_ids)
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.logprobs for completion in completions],
        }

    return generate


def _make_worker(trainer: GRPOTrainer, config: EngineConfig | None, timeline: Any) -> RolloutWorker:
    device = next(trainer.model.parameters()).device
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or device.type != trainer.accelerator.device.type:
        raise ValueError(
            f"the model is on {device} and will be sharded or moved to {trainer.accelerator.device} when training "
            "starts, which isn't supported yet: train on one device or with DDP"
        )
    if config is None:
        phase = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        config = EngineConfig(max_rows=min(EngineConfig().max_rows, phase))
    if config.eos_token_ids is None:
        config = replace(config, eos_token_ids=tuple(trainer.eos_token_ids))
    return RolloutWorker(trainer.model, config, timeline=timeline, progress=not trainer.args.disable_tqdm)


def _check(trainer: GRPOTrainer) -> None:
    if not isinstance(trainer, GRPOTrainer):
        raise ValueError(f"only trl.GRPOTrainer and what derives from it can be served, not {type(trainer).__name__}")
    missing = [name for name in _ATTRIBUTES if not hasattr(trainer, name)]
    for method, names in _CALLS.items():
        function = inspect.unwrap(getattr(GRPOTrainer, method, None) or _nothing)
        spoken = set(function.__code__.co_names)
        missing += [f"{name} in {method}()" for name in sorted(names - spoken)]
    if missing:
        raise RuntimeError(
            f"TRL {version('trl')} is put together differently from the versions tested ({', '.join(TESTED_TRL)}): "
            f"GRPOTrainer has no {', '.join(missing)}. Install one of those, or a rollout that knows this one"
        )
    if trainer._is_vlm:
        raise ValueError("the model takes images, which isn't supported: train on text, or leave generation to TRL")
    _check_no_other_backend(trainer.use_vllm, trainer.use_transformers_continuous_batching)


def _nothing() -> None:
    pass


def _check_no_other_backend(use_vllm: bool, use_paged: bool) -> None:
    for name, on in (("use_vllm", use_vllm), ("use_transformers_continuous_batching", use_paged)):
        if on:
            raise ValueError(
                f"{name}=True asks for another backend, or one is attached already: rollout needs it False"
            )


def _check_correction(trainer: GRPOTrainer) -> None:
    """What TRL checks itself where vLLM is asked for from the start, and what long completions need."""
    mode = trainer.vllm_importance_sampling_mode
    if not trainer.vllm_importance_sampling_correction:
        return
    if trainer.loss_type == "vespo" and mode not in ("token_truncate", "token_mask"):
        raise ValueError(
            f"loss_type='vespo' needs vllm_importance_sampling_mode 'token_truncate' or 'token_mask', not {mode!r}"
        )
    if mode.startswith("sequence") and trainer.max_completion_length >= 1024:
        warnings.warn(
            f"vllm_importance_sampling_mode={mode!r} sums log-ratios over {trainer.max_completion_length} tokens, so "
            "rounding alone masks or cuts many completions: set it to 'token_truncate'",
            UserWarning,
            stacklevel=3,
        )
    if trainer.top_k or trainer.top_p < 1.0 or trainer.min_p:
        warnings.warn(
            "top_k, top_p and min_p draw from fewer tokens than the learner's logprobs know of, which biases "
            "importance ratios by the kept probability mass, logged as rollout/kept_mass_mean",
            UserWarning,
            stacklevel=3,
        )
