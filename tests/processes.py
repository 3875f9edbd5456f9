"""Runs cases in several gloo processes at once, started only once for all cases of a test file."""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

Case = Callable[[int], None]
"""Gets its rank; raises if anything is amiss."""


def run(cases: Mapping[str, Case], world_size: int, folder: Path) -> dict[str, list[str]]:
    """Runs every case in `world_size` processes; what each case's ranks raised, by the case's name."""
    torch.multiprocessing.spawn(_process, (world_size, str(folder), dict(cases)), nprocs=world_size)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [errors[name] for errors in ranks if errors[name]] for name in cases}


def _process(rank: int, world_size: int, folder: str, cases: Mapping[str, Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=20),
    )
    errors: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case(rank)
            errors[name] = ""
        except BaseException:
            errors[name] = f"rank {rank}: {traceback.format_exc()}"
    Path(folder, f"rank{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()
