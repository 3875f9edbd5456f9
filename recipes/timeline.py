"""Where the GPU waits for the host, as a picture: the same engine in turns with its host, and overlapped.

A decode loop that takes turns has the GPU idle while the host reads tokens, schedules and fills the next batch. With
two slots of buffers the host does that while the GPU runs the step before. This recipe runs both on one workload, 32
completions of 8,192 tokens by a model of 8B parameters with random weights, and draws who worked when:

    python recipes/timeline.py                                       # timeline.svg, timeline.png with matplotlib
    python recipes/timeline.py --model 1.7b --bs 256 --new 2048 --out /tmp/small
    python recipes/timeline.py --model tiny --bs 4 --prompt 16 --new 64 --device cpu    # a CPU will do

Green: host and GPU work. Light: the GPU works, the host waits. Red: the GPU does nothing. Beside the pictures lies a
trace of each run for ui.perfetto.dev. Beside idle stands MBU, the share of the memory's bandwidth (that of a large
copy, measured here) that decode steps used, for a busy GPU is not yet a fast one.

`--check` asks a second witness. It profiles a phase of `--check_new` tokens in both modes with torch.profiler, and
compares idle shares over the same decode steps: ours, from an event before and after each step, and the profiler's,
from the union of its CUDA kernels. Kernels of one graph launch count as one piece, as a step does here; the union of
single kernels, which sees the gaps within a graph too, is printed beside it. The exit status is 1 if they differ by
more than half a point. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_decode import SHAPES, commit, copy_bandwidth, kv_bytes_per_token, random_model, rounded, weight_bytes
from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.observe import Timeline
from rollout.observe.breakdown import format_breakdown
from rollout.observe.cost import bandwidth_share, phase_positions
from rollout.observe.picture import picture, shares, union

MODES = {"synchronous": False, "overlapped": True}
TOLERANCE = 0.005
"""Half a point of idle share."""


def make_worker(model: PreTrainedModel, args: argparse.Namespace, overlap: bool, timeline: Timeline) -> RolloutWorker:
    """An engine with room for every completion, warmed up."""
    block_size = EngineConfig().block_size
    blocks = args.bs * -(-(args.prompt + args.new) // block_size) + 8
    config = EngineConfig(
        max_rows=args.bs,
        max_model_len=args.prompt + args.new,
        kv_cache_bytes=blocks * block_size * kv_bytes_per_token(model),
        overlap=overlap,
    )
    worker = RolloutWorker(model, config, timeline=timeline)
    worker.generate(prompts(model, args, seed=0), SamplingParams(max_tokens=min(args.new, 8), ignore_eos=True))
    timeline.clear()
    return worker


def prompts(model: PreTrainedModel, args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Random ones: equal ones would be computed once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, model.config.vocab_size, (args.bs, args.prompt), generator=generator).tolist()


def run(
    model: PreTrainedModel, args: argparse.Namespace, mode: str, bytes_s: float
) -> tuple[Timeline, dict[str, Any], dict[str, Any] | None]:
    """One engine: the timed phase, its figures, and what the check found, if one was asked for."""
    timeline = Timeline(capacity=12 * (args.new + args.bs) + 4096)
    with make_worker(model, args, MODES[mode], timeline) as worker:
        worker.generate(prompts(model, args, seed=1), SamplingParams(max_tokens=args.new, ignore_eos=True))
        metrics, breakdown = worker.metrics, worker.breakdown
        timeline.write_trace(args.out.with_name(f"{args.out.name}.{mode}.trace.json"))
        who = shares(timeline)
        check = None
        if args.check:
            checked = Timeline(capacity=12 * (args.check_new + args.bs) + 4096)
            worker.engine.recorder = checked
            check = compare(worker, checked, prompts(model, args, seed=2), args.check_new)
    print(f"\n{mode}\n{format_breakdown(breakdown)}")
    read_bytes = metrics.decode_steps * weight_bytes(model) + kv_bytes_per_token(model) * phase_positions(
        [(args.prompt, args.new)] * args.bs
    )
    figures = {
        "generate_s": metrics.generate_s,
        "tok_s": metrics.generated_tok_s,
        "idle_share": timeline.idle_share(),
        "both_share": who.both_s / who.wall_s,
        "mbu": bandwidth_share(read_bytes, metrics.decode_s + breakdown.bubble_s + breakdown.tail_idle_s, bytes_s),
        "seconds": breakdown.parts(),
    }
    return timeline, figures, check


# The second witness


def compare(worker: RolloutWorker, timeline: Timeline, asked: list[list[int]], new: int) -> dict[str, Any]:
    """Idle shares of the same phase's middle by the timeline and by torch.profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        worker.generate(asked, SamplingParams(max_tokens=new, ignore_eos=True))
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    decode = timeline.spans_s("compute", "decode")
    edge = max(1, len(decode) // 20)  # rows join at the start and leave at the end
    ours = timeline.idle_share("compute", float(decode[edge, 0]), float(decode[-edge - 1, 1]))
    try:
        theirs = profiled_idle(events, len(decode), edge)
    except ValueError as error:  # the pictures are worth having all the same
        print(f"no check: {error}")
        theirs = {"profiler": math.nan, "profiler_kernels": math.nan}
    return {"timeline": ours, **theirs, "agrees": abs(ours - theirs["profiler"]) <= TOLERANCE}


def profiled_idle(events: list[dict[str, Any]], steps: int, edge: int) -> dict[str, float]:
    """Idle shares from a Chrome trace of torch.profiler, without `edge` decode steps at the start and at the end.

    Args:
        events: the trace's.
        steps: decode steps in it, each one graph launch, whose kernels share a correlation id.
        edge: at least 1.

    Returns:
        `profiler`: between pieces, a piece being a graph launch, or a kernel of its own; `profiler_kernels`: between
        kernels.

    Raises:
        ValueError: the trace has another number of graph launches.
    """
    kernels = [e for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"]
    spans = np.array([(e["ts"], e["ts"] + e["dur"]) for e in kernels], float).reshape(-1, 2)  # us
    _, piece, sizes = np.unique([e["args"]["correlation"] for e in kernels], return_inverse=True, return_counts=True)
    starts, ends = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(starts, piece, spans[:, 0])
    np.maximum.at(ends, piece, spans[:, 1])
    launches = np.argsort(starts)
    launches = launches[sizes[launches] > 1]
    if len(launches) != steps:
        raise ValueError(f"the profile has {len(launches)} graph launches for {steps} decode steps: use_graphs is off?")
    since, until = starts[launches[edge]], ends[launches[-edge - 1]]

    def idle(busy: np.ndarray) -> float:
        covered = union(busy.clip(since, until))
        return float(1.0 - (covered[:, 1] - covered[:, 0]).sum() / (until - since))

    return {"profiler": idle(np.stack([starts, ends], axis=1)), "profiler_kernels": idle(spans)}


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=SHAPES, default="8b" if cuda else "tiny")
    parser.add_argument("--bs", type=int, default=32 if cuda else 4, help="rows")
    parser.add_argument("--prompt", type=int, default=512 if cuda else 16, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=8192 if cuda else 64, help="tokens in a completion")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, default=Path("timeline"), help="where to write, without an ending")
    parser.add_argument("--check", action="store_true", help="compare idle shares with torch.profiler's")
    parser.add_argument("--check_new", type=int, default=256, help="tokens in a completion of the profiled phase")
    args = parser.parse_args(argv)
    if min(args.bs, args.prompt) < 1 or args.new < 8:
        parser.error("--bs and --prompt must be at least 1, and --new at least 8")
    if args.check and torch.device(args.device).type != "cuda":
        parser.error("--check profiles CUDA kernels: it needs a GPU")
    if not 8 <= args.check_new <= args.new and args.check:
        parser.error("--check_new must be at least 8 and at most --new")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run both, draw, check; print the table and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bytes_s = copy_bandwidth(device)
    model = random_model(args.model, device)
    timelines, figures, checks = {}, {}, {}
    for mode in MODES:
        timelines[mode], figures[mode], check = run(model, args, mode, bytes_s)
        if check is not None:
            checks[mode] = check
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    title = f"{args.model}, {args.bs} rows, {args.prompt:,} + {args.new:,} tokens, {gpu}"
    scene = picture(list(timelines.items()), title=title)
    written = [scene.write(args.out.with_name(f"{args.out.name}.svg"))]
    try:
        written.append(scene.write(args.out.with_name(f"{args.out.name}.png")))
    except ImportError as error:
        print(f"\nno PNG: {error}")
    print(f"\n{title}\n{'':<12} {'seconds':>9} {'tok/s':>9} {'idle':>8} {'MBU':>8}")
    for mode, one in figures.items():
        print(
            f"{mode:<12} {one['generate_s']:>9.2f} {one['tok_s']:>9,.0f} {one['idle_share']:>8.2%} {one['mbu']:>8.1%}"
        )
    if checks:
        print(f"\n{'idle share':<12} {'timeline':>9} {'profiler':>9} {'differ by':>10} {'single kernels':>15}")
        for mode, one in checks.items():
            points = abs(one["timeline"] - one["profiler"]) * 100
            print(
                f"{mode:<12} {one['timeline']:>9.2%} {one['profiler']:>9.2%} {points:>6.2f} pts "
                f"{one['profiler_kernels']:>15.2%}  {'agree' if one['agrees'] else 'DISAGREE'}"
            )
    print(f"\nwritten: {', '.join(map(str, written))}\n")
    report = rounded(
        {
            "recipe": "timeline",
            "gpu": gpu,
            "torch": str(torch.__version__),
            "commit": commit(),
            "model": args.model,
            "bs": args.bs,
            "prompt": args.prompt,
            "new": args.new,
            "copy_tb_s": bytes_s / 1e12,
            "results": figures,
            "check": checks or None,
        }
    )
    print(json.dumps(report, allow_nan=False), flush=True)
    return report


if __name__ == "__main__":
    checked = main(sys.argv[1:])["check"] or {}
    sys.exit(0 if all(one["agrees"] for one in checked.values()) else 1)
