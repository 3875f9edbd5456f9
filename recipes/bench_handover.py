"""What it costs to hand a GPU's memory back and forth between the learner and the engine.

One GPU serves both by turns. While the engine generates, keys and values fill the memory; while the learner trains, its
activations do. So a training step is a round:

    generate ▸ sleep ▸ learner's step ▸ exchange ▸ wake ▸ first token

`sleep` unmaps the KV cache (and weights of the engine's own), `wake` maps what is free, at the same addresses, so no
CUDA graph is captured again. Mapping memory costs a few milliseconds for tens of GiB, for nothing is copied. `exchange`
copies nothing either where engine and learner share their weights (`--shared`), and is one pass over them where a
float32 learner feeds a bf16 engine (`--copied`): that takes the bytes read and written over the memory's bandwidth.

The learner here is a stand-in: it takes memory and writes to all of it, as activations would, and then changes every
parameter in place, as an optimiser does. PyTorch keeps what the learner took, its *reserve*, for the next step. If the
KV cache fits beside that (`--learner-gib 40`), `wake` leaves it alone; else it has to be freed first. By default it has
to: the learner takes nine tenths of the free memory. The output says which it was. Its step takes a second at least
(`--learner-s`), as a real one does: the driver clears memory that was freed, and mapping waits for that if it comes too
soon. Weights are random, of real shapes.

Prints a table of medians over the phases with the free memory after each part of a round, then one JSON line. Raises if
anything was captured again, an address has moved, or, over 50 phases and more, memory grew: that is what `--model tiny
--phases 200` is for.

    python recipes/bench_handover.py --model 1.7b --shared
    python recipes/bench_handover.py --model 1.7b --shared --learner-gib 40
    python recipes/bench_handover.py --model 8b --copied --kv-gib 40
    python recipes/bench_handover.py --model tiny --phases 200         # a CPU will do
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_decode import SHAPES, command_line, commit, copy_bandwidth, print_report, random_model
from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.calls import device_name

PARTS = ("generate", "sleep", "learner", "exchange", "wake", "first token")
GIB = 1 << 30
JUDGED_PHASES = 50
GROWTH_BYTES = 32 << 20
"""More than this, over `JUDGED_PHASES` and more, is growth. A GPU's driver hands memory out in pieces of 2 MiB."""


class Part(NamedTuple):
    """A part of a round."""

    seconds: float
    free_bytes: int
    """Of the device, afterwards."""
    freed_bytes: int
    """Of PyTorch's reserve, given back meanwhile."""


def free_bytes(device: torch.device) -> int:
    """Memory that nobody holds on a GPU. On a CPU, what this process leaves of 64 GiB, a figure that moves alike."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 64 * GIB - resident_pages * 4096


def reserve_bytes(device: torch.device) -> int:
    """Memory that PyTorch holds on a GPU, in use or at hand. 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def used_bytes(device: torch.device) -> int:
    """What of the reserve is in use."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def learner_step(model: torch.nn.Module, device: torch.device, scratch_bytes: int, least_s: float) -> None:
    """Fills memory as activations would, for `least_s` seconds, then changes every parameter in place."""
    until_s = time.perf_counter() + least_s
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
    scratch.fill_(1)
    while time.perf_counter() < until_s:
        scratch.fill_(1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.0001)


def addresses(worker: RolloutWorker) -> list[int]:
    """Of all that graphs are bound to."""
    engine = worker.engine
    tensors = [engine.kv, *engine.module.parameters()]
    tensors += [t for slot in engine.slots for t in (slot.device_in, slot.device_out)]
    return [t.data_ptr() for t in tensors]


def round_trip(
    worker: RolloutWorker, model: PreTrainedModel, args: argparse.Namespace, device: torch.device
) -> dict[str, Part]:
    """One phase, by part."""
    generator = torch.Generator().manual_seed(worker.policy_version)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(10, vocabulary, (args.rows, args.prompt), generator=generator).tolist()
    scratch_bytes = 0

    def sleep() -> None:
        nonlocal scratch_bytes
        report = worker.sleep()
        free = report.free_bytes + reserve_bytes(device) - used_bytes(device)
        default = int(0.9 * free) if device.type == "cuda" else 8 << 20
        scratch_bytes = default if args.learner_gib is None else int(args.learner_gib * GIB)

    parts: dict[str, Callable[[], Any]] = {
        "generate": lambda: worker.generate(prompts, SamplingParams(max_tokens=args.new, ignore_eos=True)),
        "sleep": sleep,
        "learner": lambda: learner_step(model, device, scratch_bytes, args.learner_s),
        "exchange": lambda: worker.exchange(model),
        "wake": worker.wake,
        "first token": lambda: worker.generate(prompts[:1], SamplingParams(max_tokens=1, ignore_eos=True)),
    }
    done = {}
    for name, part in parts.items():
        reserve = reserve_bytes(device)
        start_s = time.perf_counter()
        part()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start_s
        done[name] = Part(seconds, free_bytes(device), max(0, reserve - reserve_bytes(device)))
    return done


def growth_bytes(free_after: list[int]) -> int:
    """How much less is free at the end than when the first tenth of the phases had passed, by medians."""
    edge = max(1, len(free_after) // 10)
    return int(statistics.median(free_after[edge : 2 * edge]) - statistics.median(free_after[-edge:]))


def table(rounds: list[dict[str, Part]]) -> str:
    """Medians, a line for each part of a round."""
    lines = [f"{'':<12} {'median ms':>10} {'worst ms':>10} {'free GiB after':>15}"]
    for name in PARTS:
        seconds = [one[name].seconds for one in rounds]
        free = statistics.median(one[name].free_bytes for one in rounds)
        lines.append(
            f"{name:<12} {statistics.median(seconds) * 1e3:>10.2f} {max(seconds) * 1e3:>10.2f} {free / GIB:>15.2f}"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=SHAPES, default="1.7b" if cuda else "tiny")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--shared", dest="copied", action="store_false", help="one storage for both (the default)")
    weights.add_argument("--copied", action="store_true", help="a float32 learner and a bf16 engine")
    parser.set_defaults(copied=False)
    parser.add_argument("--kv-gib", type=float, default=80.0 if cuda else 0.25, help="KV cache, or what fits of it")
    parser.add_argument(
        "--learner-gib", type=float, help="what the learner takes; default: nine tenths of what is free, tiny: 1 GiB"
    )
    parser.add_argument("--learner-s", type=float, help="seconds of its step at least; default: 1 on a GPU, tiny: 0")
    parser.add_argument("--rows", type=int, default=64 if cuda else 4, help="sequences at once")
    parser.add_argument("--prompt", type=int, default=128 if cuda else 16, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=32 if cuda else 8, help="tokens in a completion")
    parser.add_argument("--max-model-len", type=int, default=16384 if cuda else 1024)
    parser.add_argument("--phases", type=int, default=20)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    args = parser.parse_args(argv)
    if args.phases < 2 or args.kv_gib <= 0 or (args.learner_gib or 1) <= 0:
        parser.error("--phases must be at least 2, and --kv-gib and --learner-gib positive")
    if args.learner_gib is None and args.model == "tiny" and args.device.startswith("cuda"):
        args.learner_gib = 1.0  # many phases are what a tiny model is for
    if args.learner_s is None:
        args.learner_s = 1.0 if args.device.startswith("cuda") and args.model != "tiny" else 0.0
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what the line holds."""
    args = parse(argv)
    device = torch.device(args.device)
    bytes_s = copy_bandwidth(device)
    model = random_model(args.model, device)
    if args.copied:
        model = model.float()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    own_bytes = sum(p.numel() * 2 for p in model.parameters()) if args.copied else 0
    room = 0.9 * (free_bytes(device) - own_bytes)
    config = EngineConfig(
        max_rows=args.rows,
        max_model_len=args.max_model_len,
        kv_cache_bytes=int(min(args.kv_gib * GIB, room)),
        dtype=torch.bfloat16 if args.copied else None,
    )
    with RolloutWorker(model, config) as worker:
        round_trip(worker, model, args, device)  # compiles kernels, makes library handles
        awake = worker.memory_report()
        where, captures = addresses(worker), worker.engine.steps.graphs.captures
        rounds = [round_trip(worker, model, args, device) for _ in range(args.phases)]
        again = worker.engine.steps.graphs.captures - captures
        if again or addresses(worker) != where:
            raise RuntimeError(f"{again} graphs were captured again, or an address has moved")
        free_awake = free_bytes(device)
        asleep = worker.sleep()
        # On a CPU pages come when they are touched, so a short run never held most of them.
        given_back = (free_bytes(device) - free_awake) / awake.held_bytes if device.type == "cuda" else None
        worker.exchange(model)
        worker.wake()
        reports = [worker.exchange(model) for _ in range(5)]  # awake, so that no memory is mapped meanwhile
    growth = growth_bytes([one["sleep"].free_bytes for one in rounds])
    if args.phases >= JUDGED_PHASES and growth > GROWTH_BYTES:
        raise RuntimeError(f"{growth} bytes of memory less are free asleep after {args.phases} phases than at first")
    freed = int(statistics.median(one["exchange"].freed_bytes + one["wake"].freed_bytes for one in rounds))

    gpu = device_name(device)
    medians = {name: statistics.median(one[name].seconds for one in rounds) for name in PARTS}
    switch = statistics.median(sum(one[name].seconds for name in ("sleep", "exchange", "wake")) for one in rounds)
    moved = sum(p.nbytes for p in model.parameters()) + reports[0].copied_bytes if reports[0].copied else 0
    copy_s = statistics.median(report.copy_seconds for report in reports)
    awake_s = statistics.median(report.seconds for report in reports)
    print(f"{gpu}: {args.model}, weights {'copied' if args.copied else 'shared'}, {args.phases} phases")
    print(f"awake:  {awake}\nasleep: {asleep}\n")
    print(table(rounds))
    print(f"\nsleep + exchange + wake: {switch * 1e3:.2f} ms")
    if device.type == "cuda":
        which = f"{freed / GIB:.2f} GiB had to be freed" if freed else "the KV cache fits beside it"
        print(f"the learner's reserve: {which}")
    if moved:
        floor_s = moved / bytes_s
        print(
            f"the copy: {copy_s * 1e3:.2f} ms, {copy_s / floor_s:.2f} x what its bytes need; the whole exchange: awake "
            f"{awake_s * 1e3:.2f} ms, asleep, where its memory is mapped first, {medians['exchange'] * 1e3:.2f} ms"
        )
    if given_back is not None:
        print(f"given back: {given_back:.1%} of {awake.held_bytes / GIB:.2f} GiB")
    print(f"growth over the phases: {growth} bytes\n")
    result = {
        "bench": "handover",
        "gpu": gpu,
        "torch": str(torch.__version__),
        "commit": commit(),
        "model": args.model,
        "weights": "copied" if args.copied else "shared",
        "phases": args.phases,
        "kv_bytes": awake.kv_bytes,
        "kv_blocks": awake.kv_blocks,
        "held_bytes": awake.held_bytes,
        "graphs_bytes": awake.graphs_bytes,
        "given_back": given_back,
        "captured_again": again,
        "growth_bytes": growth,
        "freed_bytes": freed,
        "switch_ms": switch * 1e3,
        "exchange_awake_ms": awake_s * 1e3,
        "copy_ms": copy_s * 1e3,
        "copy_x_floor": copy_s / (moved / bytes_s) if moved else None,
        "median_ms": {name: seconds * 1e3 for name, seconds in medians.items()},
        "free_bytes": {name: int(statistics.median(one[name].free_bytes for one in rounds)) for name in PARTS},
    }
    return print_report(result)


if __name__ == "__main__":
    main(sys.argv[1:])
