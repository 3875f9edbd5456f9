"""How near the decode loop comes to the memory's speed.

A decode step makes one token for each row. To do so the GPU must read every weight once and every row's keys and
values once, and that takes far longer than the arithmetic: 8B parameters in bf16 are 15 GB, 32 rows of 1K positions
another 4.3 GB, and an H200 reads about 4.3 TB a second, so no step is faster than 4.5 ms. That is the *floor*:

    floor = (weight bytes + KV bytes at the counted steps' mean length) / bandwidth

with the bandwidth of a large copy on this device, measured in this run. Everything above it is a kernel that reads
slowly, a kernel too many, or a GPU that waits for the host. So two figures stand side by side: MBU, the share of that
bandwidth that a step used (floor / step), and the idle share of the compute stream. A busy GPU is not yet a fast one.

Weights are random, of real shapes, so nothing is downloaded, and end-of-sequence is ignored, so every completion has
its full length. Steps in which a row is missing, or that lie at the edge of the phase, are not counted. So a long KV is
measured by a long prompt and few new tokens, of which only the prefill takes its time. Prints a table, then one JSON
line.

    python recipes/bench_decode.py --model 8b --bs 32 --prompt 512 --new 1024
    python recipes/bench_decode.py --model 1.7b --bs 256 --prompt 256 --new 768 --overlap both
    python recipes/bench_decode.py --model 8b --bs 32 --prompt 16384 --new 96
    python recipes/bench_decode.py --model tiny --bs 4 --prompt 16 --new 32          # a CPU will do

Something else can be measured beside it, in turns (A B A B) on the same GPU. A peer is any command that prints JSON
lines with `ms_per_step` (whole run / new tokens) and, if it can tell, `median_step_ms` (of decode steps),
`decode_ms_per_step` (their mean, without the prefill), `tok_s` and `mode`. Braces get filled. Give `--peer NAME
--peer-command CMD` once for each peer:

    python recipes/bench_decode.py --model 8b --bs 32 --prompt 512 --new 1024 --repeats 2 --peer transformers \\
        --peer-command "python peer.py --model {model} --bs {bs} --prompt {prompt} --new {new} --logprobs"

In the table: `step` is the median time from one decode step's start to the next one's, `mean step` the time from the
first decode step's start to the last one's end over their number, `on device` the median time of the step itself,
`run/new` the whole phase's wall time, prefill included, over the new tokens, `host us` what the host worked a counted
step (its waits left out), `idle` the compute stream's idle share in counted steps. Of a peer, the floor is held against
its median step, or else its mean one, and ratios are of like figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from rollout import Completion, EngineConfig, RolloutWorker, SamplingParams
from rollout.calls import device_name
from rollout.observe import Timeline

SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    # Llama-3.1-8B
    "8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    # Qwen3-1.7B
    "1.7b": lambda: Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "tiny": lambda: LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
}
COLUMNS = {  # key: (head, format)
    "step_ms": ("step ms", ".3f"),
    "mean_step_ms": ("mean step", ".3f"),
    "device_ms": ("on device", ".3f"),
    "ms_per_step": ("run/new", ".3f"),
    "x_floor": ("x floor", ".2f"),
    "mbu": ("MBU", ".1%"),
    "tok_s": ("tok/s", ",.0f"),
    "host_us": ("host us", ",.0f"),
    "idle_share": ("idle", ".2%"),
}


def random_model(shape: str, device: torch.device) -> PreTrainedModel:
    """A model of the shape with random weights, bf16 on a GPU and float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype).eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: all but an untied input embedding, of which it gathers a few rows."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if embedding is head else total - embedding.numel() * embedding.element_size()


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values for one position of one row, in the model's dtype."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes: the median of 20."""
    source = torch.ones((2 << 30 if device.type == "cuda" else 64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(22):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) * 1e-3)
        else:
            start_s = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start_s)
    return 2 * source.numel() / statistics.median(seconds[2:])


def read_bytes(model: PreTrainedModel, rows: int, mean_kv: float) -> tuple[int, int]:
    """Bytes of weights and of KV that a decode step of `rows` rows reads, at `mean_kv` positions a row."""
    return weight_bytes(model), round(rows * mean_kv * kv_bytes_per_token(model))


class Steady(NamedTuple):
    """A phase's counted decode steps: all rows are there, and the phase's edges are far."""

    spans_s: np.ndarray  # [steps, 2], starts and ends on the compute stream
    periods_s: np.ndarray  # from a counted step's start to the next one's, where nothing ran in between
    mean_tokens: float  # that a row had decoded after a counted step, on average


def steady(timeline: Timeline, rows: int) -> Steady:
    """The counted steps of a phase of `rows` requests in as many rows, less a twentieth of them at either end."""
    spans_s, names = timeline.spans_s("compute"), timeline.names("compute")
    decoding = np.array([int(name.split()[1]) if name.startswith("decode") else 0 for name in names])  # [steps], rows
    tokens = decoding.cumsum() / rows  # a row's decoded tokens so far, on average: while all rows are there none ended
    full = np.flatnonzero(decoding == rows)
    assert full.size, "no step had all rows"
    edge = max(1, len(full) // 20)
    counted = full[edge:-edge] if len(full) > 2 * edge + 1 else full
    following = counted[1:][np.diff(counted) == 1]
    return Steady(spans_s[counted], spans_s[following, 0] - spans_s[following - 1, 0], float(tokens[counted].mean()))


def host_us(timeline: Timeline, since_s: float, until_s: float) -> dict[str, float]:
    """Microseconds of each part of the host's step but its wait, the mean of those that begin within the window."""
    parts = {}
    for name in timeline.summary():
        spans_s = timeline.spans_s("host", name)
        inside = spans_s[(spans_s[:, 0] >= since_s) & (spans_s[:, 0] < until_s)]
        if name != "wait" and len(inside):
            parts[name] = float((inside[:, 1] - inside[:, 0]).mean()) * 1e6
    return parts


def engine_config(model: PreTrainedModel, rows: int, tokens: int, **options: Any) -> EngineConfig:
    """An engine whose rows all fit with `tokens` tokens each, prompt and completion, so that none is preempted."""
    block_size = EngineConfig().block_size
    blocks = rows * -(-tokens // block_size) + 8
    return EngineConfig(
        max_rows=rows,
        max_model_len=tokens,
        kv_cache_bytes=blocks * block_size * kv_bytes_per_token(model),
        **options,
    )


def measure(model: PreTrainedModel, args: argparse.Namespace, bytes_s: float, overlap: bool) -> dict[str, float]:
    """One engine, warmed up, then one timed phase of `bs` completions of `new` tokens."""
    config = engine_config(
        model, args.bs, args.prompt + args.new, overlap=overlap, fused_decoder=args.forward == "fused"
    )
    timeline = Timeline(capacity=64 * (args.new + args.bs) + 4096)
    generator = torch.Generator().manual_seed(1)

    def generate(prompt: int, new: int) -> list[list[Completion]]:
        # Fresh prompts each time, so that none's KV is found in the cache.
        asked = torch.randint(10, model.config.vocab_size, (args.bs, prompt), generator=generator).tolist()
        return worker.generate(asked, SamplingParams(max_tokens=new, ignore_eos=True))

    start_s = time.perf_counter()
    with RolloutWorker(model, config, timeline=timeline) as worker:
        startup_s, graphs_bytes = time.perf_counter() - start_s, worker.memory_report().graphs_bytes
        # As much as one prefill step takes: further ones are like it.
        generate(min(args.prompt, -(-config.max_prefill_tokens // args.bs)), min(args.new, 8))
        captures = worker.metrics.graph_captures_total
        timeline.clear()
        start_s = time.perf_counter()
        groups = generate(args.prompt, args.new)
        wall_s = time.perf_counter() - start_s
        metrics = worker.metrics
    assert metrics.preemptions_total == 0, "the cache was to hold every row at its full length"
    if args.trace is not None:
        timeline.write_trace(args.trace)

    counted = steady(timeline, args.bs)
    since_s, until_s = float(counted.spans_s[0, 0]), float(counted.spans_s[-1, 1])
    mean_kv = args.prompt + counted.mean_tokens
    floor_s = sum(read_bytes(model, args.bs, mean_kv)) / bytes_s
    step_s = statistics.median(counted.periods_s.tolist()) if len(counted.periods_s) else math.nan
    decode_s = timeline.spans_s("compute", "decode")  # [steps, 2]
    tokens = sum(len(completion.token_ids) for group in groups for completion in group)
    return {
        "step_ms": step_s * 1e3,
        "mean_step_ms": float(decode_s[-1, 1] - decode_s[0, 0]) / len(decode_s) * 1e3,
        "device_ms": float(np.median(counted.spans_s[:, 1] - counted.spans_s[:, 0])) * 1e3,
        "ms_per_step": wall_s / args.new * 1e3,
        "x_floor": step_s / floor_s,
        "mbu": floor_s / step_s,
        "tok_s": tokens / wall_s,
        "host_us": sum(host_us(timeline, since_s, until_s).values()),
        "idle_share": timeline.idle_share("compute", since_s, until_s),
        "idle_share_phase": metrics.gpu_idle_frac,
        "mean_kv": mean_kv,
        "floor_ms": floor_s * 1e3,
        "total_s": wall_s,
        "tokens": tokens,
        "decode_steps": metrics.decode_steps,
        "prefill_steps": metrics.prefill_steps,
        "counted_steps": len(counted.spans_s),
        "row_occupancy": metrics.row_occupancy,
        "startup_s": startup_s,  # all graphs captured, kernels compiled where that hasn't been done before
        "graphs_bytes": graphs_bytes,
        "captures": captures,
        "captures_while_timed": metrics.graph_captures_total - captures,
    }


def measure_peer(name: str, command: str, args: argparse.Namespace, floor_s: float) -> dict[str, dict[str, float]]:
    """Run a peer's command; the figures of each JSON line it printed, by mode.

    Args:
        name: of the peer.
        command: its command, with braces yet to be filled.
        args: what fills them.
        floor_s: at the mean KV length of all its decode steps.
    """
    command = command.format(model=args.model, bs=args.bs, prompt=args.prompt, new=args.new)
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"the peer ended with {done.returncode} and {len(lines)} JSON lines: {command}")
    return {" ".join(filter(None, [name, line.get("mode")])): peer_figures(line, args.bs, floor_s) for line in lines}


def peer_figures(line: dict[str, Any], rows: int, floor_s: float) -> dict[str, float]:
    """The figures of a peer's JSON line, by our names, as far as it tells them."""
    figures = {
        "ms_per_step": line["ms_per_step"],
        "tok_s": line.get("tok_s") or rows / line["ms_per_step"] * 1e3,
        "step_ms": line.get("median_step_ms"),
        "mean_step_ms": line.get("decode_ms_per_step"),
    }
    if (step_ms := figures["step_ms"] or figures["mean_step_ms"]) is not None:
        figures |= {"x_floor": step_ms * 1e-3 / floor_s, "mbu": floor_s / (step_ms * 1e-3)}
    return {key: value for key, value in figures.items() if value is not None}


def ratios(ours: dict[str, float], peer: dict[str, float]) -> dict[str, float]:
    """Our milliseconds over the peer's: median step, mean step and whole run, as far as the peer tells them."""
    return {key: ours[key] / peer[key] for key in ("step_ms", "mean_step_ms", "ms_per_step") if key in peer}


def middle(runs: list[dict[str, float]], key: str = "ms_per_step") -> dict[str, float]:
    """The run whose `key` is the median one (of two, the lesser), whole, so that its figures belong together."""
    return sorted(runs, key=lambda figures: figures[key])[(len(runs) - 1) // 2]


def table(results: dict[str, dict[str, float]], columns: dict[str, tuple[str, str]]) -> str:
    """The results, a line each. Columns are heads and formats by key."""
    width = max(len(name) for name in results)
    lines = [" ".join([f"{'':<{width}}", *(f"{head:>10}" for head, _ in columns.values())])]
    for name, figures in results.items():
        cells = (format(figures[key], form) if key in figures else "-" for key, (_, form) in columns.items())
        lines.append(" ".join([f"{name:<{width}}", *(f"{cell:>10}" for cell in cells)]))
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """The same with each float cut to five digits, and None for NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    return value


def commit() -> str | None:
    """The checkout's commit, if git can tell."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def command_line(docstring: str) -> argparse.ArgumentParser:
    """A parser whose help is a recipe's docstring."""
    head, _, rest = docstring.partition("\n")
    return argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_sizes(
    parser: argparse.ArgumentParser,
    *,
    model: str,
    bs: tuple[int, int],
    prompt: tuple[int, int],
    new: tuple[int, int],
    completion: str = "a completion",
) -> None:
    """Adds --model, --bs, --prompt, --new and --device. Defaults are for a GPU and for a CPU, whose model is tiny."""
    cpu = not torch.cuda.is_available()
    parser.add_argument("--model", choices=SHAPES, default="tiny" if cpu else model)
    parser.add_argument("--bs", type=int, default=bs[cpu], help="rows")
    parser.add_argument("--prompt", type=int, default=prompt[cpu], help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=new[cpu], help=f"tokens in {completion}")
    parser.add_argument("--device", default="cpu" if cpu else "cuda")


def print_report(report: dict[str, Any]) -> dict[str, Any]:
    """Prints the last line of a recipe's output, and returns what it holds."""
    report = rounded(report)
    print(json.dumps(report, allow_nan=False), flush=True)
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_sizes(parser, model="1.7b", bs=(32, 4), prompt=(512, 16), new=(1024, 32))
    parser.add_argument("--overlap", choices=["on", "off", "both"], default="on", help="two slots, one, or in turns")
    parser.add_argument("--forward", choices=["fused", "module"], default="fused", help="whose forward pass is run")
    parser.add_argument("--repeats", type=int, default=1, help="rounds; the median run is reported")
    parser.add_argument("--peer", action="append", default=[], help="what to call a peer in the table")
    parser.add_argument(
        "--peer-command", action="append", default=[], help="its command, to measure in turns with this engine"
    )
    parser.add_argument("--trace", type=Path, help="write the last run's timeline here, for ui.perfetto.dev")
    args = parser.parse_args(argv)
    if min(args.bs, args.prompt, args.repeats) < 1 or args.new < 4:
        parser.error("--bs, --prompt and --repeats must be at least 1, and --new at least 4")
    if len(args.peer) != len(args.peer_command) or len(set(args.peer)) < len(args.peer):
        parser.error("each --peer needs a name of its own and a --peer-command")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    bytes_s = copy_bandwidth(device)
    model = random_model(args.model, device)
    modes = {"on": {"overlap": True}, "off": {"no overlap": False}, "both": {"overlap": True, "no overlap": False}}
    peer_floor_s = sum(read_bytes(model, args.bs, args.prompt + args.new / 2)) / bytes_s

    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for mode, overlap in modes[args.overlap].items():
            rounds.setdefault(mode, []).append(measure(model, args, bytes_s, overlap))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for peer, command in zip(args.peer, args.peer_command, strict=True):
            for name, figures in measure_peer(peer, command, args, peer_floor_s).items():
                rounds.setdefault(name, []).append(figures)
    results = {name: middle(runs) for name, runs in rounds.items()}

    first_mode = next(iter(modes[args.overlap]))
    first = results[first_mode]
    weights, kv = read_bytes(model, args.bs, first["mean_kv"])
    against = {name: ratios(first, figures) for name, figures in results.items() if name not in modes[args.overlap]}

    gpu = device_name(device)
    print(f"{gpu}: {args.model}, {args.bs} rows, prompt {args.prompt}, {args.new} new, mean KV {first['mean_kv']:,.0f}")
    print(
        f"floor {first['floor_ms']:.3f} ms = ({weights / 1e9:.3g} GB weights + {kv / 1e9:.3g} GB KV) / "
        f"{bytes_s / 1e12:.3f} TB/s of a copy\n"
    )
    print(table(results, COLUMNS) + "\n")
    for name, figures in against.items():
        print(f"{first_mode} / {name}: " + ", ".join(f"{key} {ratio:.3f}" for key, ratio in figures.items()))
    report = {
        "bench": "decode",
        "gpu": gpu,
        "torch": str(torch.__version__),
        "commit": commit(),
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "forward": args.forward,
        "bs": args.bs,
        "prompt": args.prompt,
        "new": args.new,
        "repeats": args.repeats,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "copy_tb_s": bytes_s / 1e12,
        "floor_ms": first["floor_ms"],
        "step_ms": first["step_ms"],
        "tok_s": first["tok_s"],
        "idle_share": first["idle_share"],
        "mbu": first["mbu"],
        "results": results,
        "ours_over": against,
    }
    return print_report(report)


if __name__ == "__main__":
    main(sys.argv[1:])
