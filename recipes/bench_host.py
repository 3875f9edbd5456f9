"""What the host works in a decode step, part by part, as rows grow.

While the GPU runs step N the host prepares step N+1: it schedules (which rows decode, which need a block), fills a
slot's buffers, launches the copies and the graph, and, when N's tokens are there, updates every sequence. As long as
that takes less than the GPU's step it costs nothing; beyond, the GPU waits. So it must not grow with rows as a Python
loop would.

The model is tiny, so that its step is quicker than the host and the host is seen alone. Prompts are of ragged lengths,
so that in each step a few rows begin a new block, as in real work. Counted are the steps of one phase in which every
row decodes. On a CPU the model runs within `launch`: look at the other parts there.

Prints a line for each number of rows, microseconds a step, then one JSON line.

    python recipes/bench_host.py
    python recipes/bench_host.py --rows 64 256 --new 128 --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_decode import command_line, commit, engine_config, host_us, print_report, random_model, steady
from rollout import RolloutWorker, SamplingParams
from rollout.calls import device_name
from rollout.observe import Timeline

PARTS = ("schedule", "fill", "launch", "update")
LONGEST_PROMPT = 128


def measure(model: PreTrainedModel, rows: int, new: int) -> dict[str, float]:
    """Microseconds of each part of the host's step, their sum, and the step's own, for `rows` rows."""
    timeline = Timeline(capacity=16 * (new + rows) + 4096)
    generator = torch.Generator().manual_seed(0)

    def prompts() -> list[list[int]]:
        lengths = torch.randint(1, LONGEST_PROMPT + 1, (rows,), generator=generator).tolist()
        return [torch.randint(10, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    with RolloutWorker(model, engine_config(model, rows, LONGEST_PROMPT + new), timeline=timeline) as worker:
        worker.generate(prompts(), SamplingParams(max_tokens=8, ignore_eos=True))
        timeline.clear()
        worker.generate(prompts(), SamplingParams(max_tokens=new, ignore_eos=True))
    counted = steady(timeline, rows)
    parts = host_us(timeline, float(counted.spans_s[0, 0]), float(counted.spans_s[-1, 1]))
    assert set(parts) == set(PARTS), f"the host's parts are {sorted(parts)}"
    return {
        **{name: parts[name] for name in PARTS},
        "host": sum(parts.values()),
        "step": statistics.median(counted.periods_s.tolist()) * 1e6,
        "on device": statistics.median((counted.spans_s[:, 1] - counted.spans_s[:, 0]).tolist()) * 1e6,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--new", type=int, default=256, help="tokens in a completion")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if min(args.rows) < 1 or args.new < 8:
        parser.error("--rows must be at least 1, and --new at least 8")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    gpu = device_name(device)
    model = random_model("tiny", device)
    results = {str(rows): measure(model, rows, args.new) for rows in args.rows}
    print(f"{gpu}: microseconds a step")
    columns = (*PARTS, "host", "step", "on device")
    print(" ".join([f"{'rows':>6}", *(f"{name:>10}" for name in columns)]))
    for rows, figures in results.items():
        print(" ".join([f"{rows:>6}", *(f"{figures[name]:>10.0f}" for name in columns)]))
    return print_report({"bench": "host", "gpu": gpu, "commit": commit(), "new": args.new, "us": results})


if __name__ == "__main__":
    main(sys.argv[1:])
