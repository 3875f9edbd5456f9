"""A tiny tokenizer, data and trainer arguments for tests of the TRL plug-in, all made without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig

from rollout.config import EngineConfig
from rollout.observe.breakdown import Breakdown
from rollout.observe.metrics import PhaseMetrics
from rollout.observe.switches import SwitchTimes
from rollout.types import Completion, SamplingParams, VersionRun

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
"""The first three are what `tests.tiny_models` calls padding, beginning and end."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each ASCII character, with a chat template; its 103 ids fit the tiny models' vocabulary."""
    characters = ["\n", *(chr(i) for i in range(32, 127))]
    vocab = {token: i for i, token in enumerate(SPECIAL + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[4:],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompts(count: int = 8, *, chat: bool = False) -> Dataset:
    """Prompts of different lengths, with a column that goes to the reward."""
    texts = [f"{i} + {i * 7 % 10 * '1'} =" for i in range(count)]
    column = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    return Dataset.from_dict({"prompt": column, "target": [str(i) for i in range(count)]})


def share_of_digits(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that differs between completions: how much of one is digits."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch.isdigit() for ch in text) / max(len(text), 1) for text in texts]


def arguments(folder: Path, **overrides: Any) -> GRPOConfig:
    """Two prompts of four generations a step, twelve tokens each, in float32 on the CPU, logging every step."""
    return GRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            **overrides,
        }
    )


class FakeWorker:
    """A `RolloutWorker` without an engine. A completion's first token is the prompt's first, its second the sample's
    index; every logprob is -1. It writes down what it was asked for."""

    def __init__(self, eos_token_ids: tuple[int, ...] | None = None) -> None:
        self.config = EngineConfig(eos_token_ids=eos_token_ids)
        self.metrics = PhaseMetrics()
        self.asked: list[tuple[list[tuple[int, ...]], list[SamplingParams]]] = []
        self.exchanged: list[Any] = []
        self.calls: list[str] = []
        self.needs_exchange = False
        self.engine = SimpleNamespace(failed=False)
        self.switches = SwitchTimes()
        self.breakdown = Breakdown(decode_s=1.0, learner_s=2.0)

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Completion]]:
        self.calls.append("generate")
        self.asked.append(([tuple(p) for p in prompts], list(params)))
        self.metrics = PhaseMetrics(generate_s=1.0, generated_tokens=2 * sum(p.n for p in params))
        return [[_fake(prompt, i) for i in range(p.n)] for prompt, p in zip(prompts, params, strict=True)]

    def exchange(self, learner: Any) -> None:
        self.calls.append("exchange")
        self.exchanged.append(learner)
        self.needs_exchange = False

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")
        self.switches.slept(0.25)


def _fake(prompt: Sequence[int], sample: int) -> Completion:
    return Completion(list(prompt), [prompt[0], sample], [-1.0, -1.0], "length", (VersionRun(0, 2),))


def fake_trainer(**arguments: Any) -> Any:
    """What `RolloutBackend` reads of a trainer, at step 0 of training."""
    own = {"seed": 7, "generation_kwargs": None, **arguments.pop("args", {})}
    return SimpleNamespace(
        **{
            "accelerator": SimpleNamespace(process_index=0, num_processes=1),
            "add_callback": lambda callback: None,
            "args": SimpleNamespace(**own),
            "eos_token_ids": [2],
            "max_completion_length": 12,
            "model": SimpleNamespace(training=True),
            "state": SimpleNamespace(global_step=0),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "_last_loaded_step": -1,
            "_metrics": {"train": {}, "eval": {}},
            **arguments,
        }
    )
