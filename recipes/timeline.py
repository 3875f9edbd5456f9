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

`--check` asks a second witness. It profiles a phase of `--check-new` tokens in both modes with torch.profiler, and
compares idle shares of the whole phase: ours, from an event at each step's start and end, and the profiler's, from each
step's first kernel to its last. The union of single kernels, which sees the gaps within a step too, is printed beside
it. The exit status is 1 if the first two differ by more than half a point. `--cost` measures what keeping a timeline
costs: the host's time a step with one and without, in turns. For these two alone, a small `--new` will do:

    python recipes/timeline.py --new 256 --check --cost

Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_decode import (
    add_sizes,
    command_line,
    commit,
    copy_bandwidth,
    engine_config,
    kv_bytes_per_token,
    print_report,
    random_model,
    weight_bytes,
)
from rollout import RolloutWorker, SamplingParams
from rollout.calls import make_requests
from rollout.observe import NullTimeline, Timeline
from rollout.observe.breakdown import format_breakdown
from rollout.observe.cost import bandwidth_share, phase_positions
from rollout.observe.picture import picture, shares, union

MODES = {"synchronous": False, "overlapped": True}
TOLERANCE = 0.005
"""Half a point of idle share."""
STEPS_A_TURN = 8
"""Steps with a timeline, then as many without: few, so that what drifts falls on both alike."""


def make_worker(model: PreTrainedModel, args: argparse.Namespace, overlap: bool, timeline: Timeline) -> RolloutWorker:
    """An engine with room for every completion, warmed up."""
    config = engine_config(model, args.bs, args.prompt + args.new, overlap=overlap)
    worker = RolloutWorker(model, config, timeline=timeline)
    worker.generate(prompts(model, args, seed=0), SamplingParams(max_tokens=min(args.new, 8), ignore_eos=True))
    timeline.clear()
    return worker


def prompts(model: PreTrainedModel, args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Random ones: equal ones would be computed once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, model.config.vocab_size, (args.bs, args.prompt), generator=generator).tolist()


def run(model: PreTrainedModel, args: argparse.Namespace, mode: str, bytes_s: float) -> tuple[Timeline, dict[str, Any]]:
    """One engine: the timed phase's timeline and figures, and what was asked for beside them."""
    timeline = Timeline(capacity=12 * (args.new + args.bs) + 4096)
    with make_worker(model, args, MODES[mode], timeline) as worker:
        worker.generate(prompts(model, args, seed=1), SamplingParams(max_tokens=args.new, ignore_eos=True))
        metrics, breakdown = worker.metrics, worker.breakdown
        timeline.write_trace(args.out.with_name(f"{args.out.name}.{mode}.trace.json"))
        who = shares(timeline)
        beside: dict[str, Any] = {}
        if args.check:
            beside["check"] = compare(worker, prompts(model, args, seed=2), args.check_new)
        if args.cost and mode == "overlapped":
            beside["cost"] = recording_cost(worker, prompts(model, args, seed=3), args.check_new)
    print(f"\n{mode}\n{format_breakdown(breakdown)}")
    read_bytes = metrics.decode_steps * weight_bytes(model) + kv_bytes_per_token(model) * phase_positions(
        [(args.prompt, args.new)] * args.bs
    )
    figures = {
        "generate_s": metrics.generate_s,
        "tok_s": metrics.generated_tok_s,
        "step_us": metrics.decode_step_s * 1e6,
        "idle_share": timeline.idle_share(),
        "both_share": who.both_s / who.wall_s,
        "mbu": bandwidth_share(read_bytes, metrics.decode_s + breakdown.bubble_s + breakdown.tail_idle_s, bytes_s),
        "seconds": breakdown.parts(),
    }
    return timeline, figures | beside


# The second witness


def compare(worker: RolloutWorker, asked: list[list[int]], new: int) -> dict[str, Any]:
    """Idle shares of one phase, by a timeline and by torch.profiler. Profiling slows the host, for both of them."""
    timeline = worker.engine.recorder = Timeline(capacity=12 * (new + len(asked)) + 4096)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        worker.generate(asked, SamplingParams(max_tokens=new, ignore_eos=True))
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ours = timeline.idle_share()
    try:
        theirs = profiled_idle(events, len(timeline.spans_s("compute")))
    except ValueError as error:  # the pictures are worth having all the same
        print(f"no check: {error}")
        theirs = {"profiler": math.nan, "profiler_kernels": math.nan, "profiler_step_us": math.nan}
    start_s, end_s = timeline.spans_s("compute", "decode").T
    return {
        "timeline": ours,
        **theirs,
        "timeline_step_us": float(np.median(end_s - start_s)) * 1e6,
        "agrees": abs(ours - theirs["profiler"]) <= TOLERANCE,
    }


def profiled_idle(events: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Idle shares from the first step's start to the last one's end, by a Chrome trace of torch.profiler.

    A step's kernels are those launched after the copy of the step before's outputs to the host and before that of its
    own. Correlation ids tell, for they count the host's calls; kernels of one graph launch share one.

    Args:
        events: the trace's.
        steps: how many were run, decode and prefill.

    Returns:
        `profiler`: between steps, from a step's first kernel to its last; `profiler_kernels`: between kernels; and the
        median step's microseconds.

    Raises:
        ValueError: the trace isn't that of so many steps, one after the other.
    """

    def spans_of(category: str, name: str) -> np.ndarray:
        """[events, 3]: correlation id, start and end in microseconds."""
        found = [e for e in events if e.get("ph") == "X" and e.get("cat") == category and name in e["name"]]
        return np.array([(e["args"]["correlation"], e["ts"], e["ts"] + e["dur"]) for e in found], float).reshape(-1, 3)

    kernels, copies = spans_of("kernel", ""), spans_of("gpu_memcpy", "DtoH")
    if len(copies) != steps:
        raise ValueError(f"the profile has {len(copies)} copies to the host for {steps} steps")
    step = np.searchsorted(np.sort(copies[:, 0]), kernels[:, 0])  # [kernels]
    bounds = np.tile(
        [np.inf, -np.inf], (steps + 1, 1)
    )  # [steps, start and end]; behind the last step there may be more
    np.minimum.at(bounds[:, 0], step, kernels[:, 1])
    np.maximum.at(bounds[:, 1], step, kernels[:, 2])
    bounds = bounds[:steps]
    if not (np.isfinite(bounds).all() and (bounds[1:, 0] > bounds[:-1, 0]).all()):
        raise ValueError("the profile has steps without a kernel, or in another order than they were launched")
    since, until = bounds[0, 0], bounds[:, 1].max()

    def idle(busy: np.ndarray) -> float:
        covered = union(busy)
        return float(1.0 - (covered[:, 1] - covered[:, 0]).sum() / (until - since))

    return {
        "profiler": idle(bounds),
        "profiler_kernels": idle(kernels[step < steps, 1:]),
        "profiler_step_us": float(np.median(bounds[:, 1] - bounds[:, 0])),
    }


# What it costs


def recording_cost(worker: RolloutWorker, asked: list[list[int]], new: int) -> dict[str, float]:
    """The host's time a decode step with a timeline and without, in turns: medians in microseconds.

    The device is empty when a step begins, so the step finds the one before it done, and waits for nothing.
    """
    engine = worker.engine
    recorders = (NullTimeline(), Timeline())
    seconds: tuple[list[float], list[float]] = ([], [])
    engine.add(make_requests(asked, SamplingParams(max_tokens=new, ignore_eos=True), call=0))
    turn = 0
    while engine.has_work:
        on = turn // STEPS_A_TURN % 2
        engine.recorder = recorders[on]
        engine.streams.synchronize()
        decoded, start_s = engine.counters.decode_steps, time.perf_counter()
        engine.step()
        if engine.counters.decode_steps > decoded:
            seconds[on].append(time.perf_counter() - start_s)
            turn += 1
    off_us, on_us = (statistics.median(one) * 1e6 for one in seconds)
    return {"off_us": off_us, "on_us": on_us, "cost_us": on_us - off_us}


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_sizes(parser, model="8b", bs=(32, 4), prompt=(512, 16), new=(8192, 64))
    parser.add_argument("--out", type=Path, default=Path("timeline"), help="where to write, without an ending")
    parser.add_argument("--check", action="store_true", help="compare idle shares with torch.profiler's")
    parser.add_argument("--cost", action="store_true", help="measure what keeping a timeline costs the host")
    parser.add_argument("--check-new", type=int, default=256, help="tokens in a completion for --check and --cost")
    args = parser.parse_args(argv)
    if min(args.bs, args.prompt) < 1 or args.new < 8:
        parser.error("--bs and --prompt must be at least 1, and --new at least 8")
    if args.check and torch.device(args.device).type != "cuda":
        parser.error("--check profiles CUDA kernels: it needs a GPU")
    args.check_new = min(args.check_new, args.new)
    if args.check_new < 8:
        parser.error("--check-new must be at least 8")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run both, draw, check; print the tables and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bytes_s = copy_bandwidth(device)
    model = random_model(args.model, device)
    timelines, figures = {}, {}
    for mode in MODES:
        timelines[mode], figures[mode] = run(model, args, mode, bytes_s)
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
    print(f"\n{title}")
    print_tables(figures)
    print(f"\nwritten: {', '.join(map(str, written))}\n")
    return print_report(
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
        }
    )


def print_tables(figures: dict[str, dict[str, Any]]) -> None:
    """What was measured by mode, and what was checked."""
    print(f"{'':<12} {'seconds':>9} {'tok/s':>9} {'idle':>8} {'MBU':>8}")
    for mode, one in figures.items():
        print(
            f"{mode:<12} {one['generate_s']:>9.2f} {one['tok_s']:>9,.0f} {one['idle_share']:>8.2%} {one['mbu']:>8.1%}"
        )
    checks = {mode: one["check"] for mode, one in figures.items() if "check" in one}
    if checks:
        print(f"\n{'idle share':<12} {'timeline':>9} {'profiler':>9} {'differ by':>10} {'single kernels':>15}")
    for mode, one in checks.items():
        points = abs(one["timeline"] - one["profiler"]) * 100
        print(
            f"{mode:<12} {one['timeline']:>9.2%} {one['profiler']:>9.2%} {points:>6.2f} pts "
            f"{one['profiler_kernels']:>15.2%}  {'agree' if one['agrees'] else 'DISAGREE'}"
        )
    for one in figures.values():
        if "cost" in one:
            cost, step_us = one["cost"], one["step_us"]
            print(
                f"\nthe host's us a step: {cost['off_us']:.1f} without a timeline, {cost['on_us']:.1f} with one: "
                f"{cost['cost_us'] / step_us:.2%} of a step's {step_us:,.0f}"
            )


if __name__ == "__main__":
    results = main(sys.argv[1:])["results"].values()
    sys.exit(0 if all(one["check"]["agrees"] for one in results if "check" in one) else 1)
