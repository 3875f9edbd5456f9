"""Completions of many lengths, more of them than rows: what it is worth to admit in batches.

A completion ends, and its row is free. To fill the row at once is to stop decoding for a prefill step of one prompt: a
step that takes the GPU about as long for one short prompt as for ten. So admission waits until several rows are free.
Rows that wait are empty, though, and a decode step takes nearly as long with fewer rows. This measures both policies,
in turns on one engine: "in batches" (a sixteenth of the rows, the engine's own) and "at once" (one row). The arithmetic
of a longer prompt takes a GPU as long as reading the weights does, so that a prefill step of it alone wastes nothing,
and the policies are alike.

Lengths are drawn from a log-normal distribution, the same ones for both, with a mean of about a third of the longest,
and each request gets its own `max_tokens`. Weights are random and end-of-sequence is ignored.

In the table: `tok/s` is generated tokens over the phase's wall time, `prefills` the prefill steps, `occupancy` the
share of rows that decoded, mean over decode steps. Prints the median phase of each policy, then one JSON line.

    python recipes/bench_ragged.py --model 1.7b --bs 256 --prompt 32 --new 512
    python recipes/bench_ragged.py --model tiny --bs 64 --prompt 16 --new 48         # a CPU will do
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_decode import (
    add_sizes,
    command_line,
    commit,
    engine_config,
    middle,
    print_report,
    random_model,
    table,
)
from rollout import RolloutWorker, SamplingParams
from rollout.calls import device_name

COLUMNS = {  # key: (head, format)
    "tok_s": ("tok/s", ",.0f"),
    "seconds": ("seconds", ".2f"),
    "prefill_steps": ("prefills", ",d"),
    "decode_steps": ("decodes", ",d"),
    "row_occupancy": ("occupancy", ".1%"),
    "idle_share": ("idle", ".2%"),
}


def lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Completions' lengths in tokens: log-normal, cut to 1 ... `longest`, with a mean of about a third of it."""
    spread = 0.8
    median = longest / 3 / math.exp(spread**2 / 2)
    drawn = median * np.exp(np.random.default_rng(seed).normal(0.0, spread, count))
    return drawn.round().clip(1, longest).astype(int).tolist()


def measure(worker: RolloutWorker, args: argparse.Namespace, wanted: list[int], seed: int) -> dict[str, Any]:
    """One phase of completions as long as wanted. Fresh prompts, so that none's KV is found in the cache."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = worker.engine.shape.vocab_size
    prompts = torch.randint(10, vocabulary, (len(wanted), args.prompt), generator=generator).tolist()
    worker.generate(prompts, [SamplingParams(max_tokens=length, ignore_eos=True) for length in wanted])
    metrics = worker.metrics
    assert metrics.preemptions_total == 0, "the cache was to hold every row at its full length"
    return {
        "seconds": metrics.generate_s,
        "tok_s": metrics.generated_tok_s,
        "prefill_steps": metrics.prefill_steps,
        "decode_steps": metrics.decode_steps,
        "row_occupancy": metrics.row_occupancy,
        "idle_share": metrics.gpu_idle_frac,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_sizes(parser, model="1.7b", bs=(256, 64), prompt=(32, 16), new=(512, 48), completion="the longest completion")
    parser.add_argument("--times", type=int, default=4, help="requests a row")
    parser.add_argument("--repeats", type=int, default=1, help="rounds; the median phase is reported")
    args = parser.parse_args(argv)
    if min(args.bs, args.prompt, args.new, args.times, args.repeats) < 1:
        parser.error("--bs, --prompt, --new, --times and --repeats must be at least 1")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    model = random_model(args.model, device)
    wanted = lengths(args.times * args.bs, args.new)
    rounds: dict[str, list[dict[str, Any]]] = {}
    with RolloutWorker(model, engine_config(model, args.bs, args.prompt + args.new)) as worker:
        scheduler = worker.engine.scheduler
        policies = {"in batches": scheduler.admission_rows, "at once": 1}
        measure(worker, args, [min(args.new, 8)] * args.bs, seed=0)  # a warm-up
        for turn in range(args.repeats):
            for policy, scheduler.admission_rows in policies.items():
                rounds.setdefault(policy, []).append(measure(worker, args, wanted, seed=1 + turn))
    results = {policy: middle(runs, "seconds") for policy, runs in rounds.items()}

    gpu = device_name(device)
    mean = sum(wanted) / len(wanted)
    print(
        f"{gpu}: {args.model}, {args.bs} rows, {len(wanted)} requests, prompt {args.prompt}, mean length {mean:,.0f}, "
        f"longest {max(wanted):,}\n\n{table(results, COLUMNS)}\n"
    )
    return print_report(
        {
            "bench": "ragged",
            "gpu": gpu,
            "torch": str(torch.__version__),
            "commit": commit(),
            "model": args.model,
            "bs": args.bs,
            "prompt": args.prompt,
            "new": args.new,
            "requests": len(wanted),
            "repeats": args.repeats,
            "mean_length": mean,
            "admission_rows": policies,
            "gain": results["in batches"]["tok_s"] / results["at once"]["tok_s"],
            "results": results,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
