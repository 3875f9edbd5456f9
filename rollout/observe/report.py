"""A run as one HTML page: `python -m rollout.observe.report RUN_DIR` writes RUN_DIR/report.html.

Reads the rollout.jsonl that the trainer's plug-in wrote. The page is one file with its charts in it: it needs no
network and no script, and reads at a desktop's width and a phone's. Owns what is shown and in which order.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rollout.observe.charts import Values, columns, histogram, lines, share, short
from rollout.observe.records import FILE, read_phases

Phase = Mapping[str, Any]

PARTS = {  # name in the records: (what it is called, its colour)
    "decode": ("decode", "#1a8a4f"),
    "tail_busy": ("tail, GPU busy", "#7cc79a"),
    "prefill": ("prefill", "#2f9e9a"),
    "bubble": ("scheduling bubble", "#e5484d"),
    "tail_idle": ("tail, GPU idle", "#f2a0a2"),
    "admission": ("admission", "#f08c3c"),
    "edges": ("start and end of phase", "#d9b44a"),
    "exchange": ("weight exchange", "#7c5cd6"),
    "sleep": ("sleep", "#4a7fd8"),
    "wake": ("wake", "#92b6ee"),
    "learner": ("learner and rest", "#a3abb5"),
}
MEMORY = {
    "kv_bytes": "KV cache",
    "weights_own_bytes": "engine's own weights",
    "weights_shared_bytes": "weights shared with the learner",
    "graphs_bytes": "graphs",
    "slots_bytes": "buffers",
    "free_bytes": "free",
}
POINTS = 120
"""Places on an axis; longer runs are drawn as means of neighbouring phases."""

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--rule:#d8dde2;--page:#f6f7f8;--card:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa3ad;--rule:#343b43;--page:#14171a;--card:#1d2125}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:16px;margin:0 0 2px}
p{margin:0 0 10px;color:var(--soft)}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px 16px;min-width:0}
.wide{grid-column:1/-1}
.tiles{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));margin:16px 0 14px}
.tiles .card{padding:10px 14px}.tiles b{display:block;font-size:21px;font-weight:600}
.tiles span{color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:var(--soft)}
.rule{stroke:var(--rule);fill:none}.dot:hover circle{r:4}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;list-style:none;font-size:13px}
i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.bar{display:flex;height:26px;border-radius:5px;overflow:hidden;margin:4px 0 12px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
td,th{padding:3px 12px 3px 0;text-align:right;white-space:nowrap;font-weight:400}
td:first-child,th:first-child{text-align:left}th{color:var(--soft)}tr+tr td{border-top:1px solid var(--rule)}
.scroll{overflow-x:auto;margin-top:10px}summary{cursor:pointer;font-weight:600}.none{font-style:italic}
"""


def page(phases: Sequence[Phase], *, title: str) -> str:
    """The HTML document.

    Args:
        phases: `rollout.observe.records.read_phases`' records.
        title: shown on top, say the run's directory.
    """
    train = [phase for phase in phases if phase["mode"] == "train"] or list(phases)
    x, groups = _grouped(train)
    cards = [
        _time_card(phases),
        _card(
            "Reward", "mean of the completions, by phase", lines(x, {"reward": _means(groups, "reward")}, zero=False)
        ),
        _card("Throughput", "tokens a second, by phase", lines(x, {"tok/s": _means(groups, "generated_tok_s")})),
        _card("Time by phase", "seconds since the phase before", _time_columns(x, groups)),
        _card("Lengths", "tokens in a completion, by phase", lines(x, _lengths(groups))),
        _lengths_card(train[-1]),
        _card(
            "Tail", "share of a phase with under half of the rows, and rows in use", lines(x, _tail(groups), form=share)
        ),
        _card(
            "GPU",
            "idle between steps, KV blocks in use, and what decode steps use of the GPU",
            lines(x, _gpu(groups), form=share),
        ),
        _card("Memory", "GiB on the first rank while it generates", _memory_columns(x, groups)),
        _card("Versions", "tokens by how many exchanges ago their policy was the latest", _version_columns(x, groups)),
        _card("Ends", "completions by finish reason", _reason_columns(x, groups)),
        _table_card(phases),
    ]
    others = len(phases) - len(train)
    note = f", and {others:,} of evaluation, in the table and the time alone" if others else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n"
        f"<h1>{escape(title)}</h1><p>{len(train):,} phases of training{note}</p>\n{_tiles(phases, train)}\n"
        f'<div class="grid">\n{"".join(cards)}</div>\n</main></body></html>\n'
    )


def _tiles(phases: Sequence[Phase], train: Sequence[Phase]) -> str:
    tokens = sum(phase["generated_tokens"] for phase in phases)
    generate_s = math.fsum(phase["generate_s"] for phase in phases)
    seconds = _seconds(phases)
    wall_s = math.fsum(seconds.values())
    busy_s = seconds["decode"] + seconds["prefill"] + seconds["tail_busy"]
    idle_s = seconds["bubble"] + seconds["admission"] + seconds["tail_idle"]
    rewards = [phase["reward"] for phase in train if phase.get("reward") is not None]
    tenth = max(1, len(rewards) // 10)
    tiles = {
        "reward, first to last tenth": " → ".join(short(sum(p) / tenth) for p in (rewards[:tenth], rewards[-tenth:]))
        if rewards
        else "–",
        "tokens a second": short(tokens / generate_s) if generate_s else "–",
        "tokens": short(tokens),
        "completions": short(sum(phase["completions"] for phase in phases)),
        "GPU idle in phases": share(idle_s / (busy_s + idle_s)) if busy_s else "–",
        "of the time, generating": share((wall_s - _outside(seconds)) / wall_s) if wall_s else "–",
        "wall time": duration(wall_s),
    }
    return '<div class="tiles">' + "".join(_tile(name, value) for name, value in tiles.items()) + "</div>"


def _tile(name: str, value: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _card(title: str, note: str, body: str, *, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{escape(title)}</h2><p>{escape(note)}</p>{body}</section>\n'


def _time_card(phases: Sequence[Phase]) -> str:
    seconds = {name: s for name, s in _seconds(phases).items() if s > 0}
    wall_s = math.fsum(seconds.values()) or 1.0
    bar = "".join(
        f'<div style="width:{s / wall_s:.4%};background:{PARTS[name][1]}" title="{PARTS[name][0]}"></div>'
        for name, s in seconds.items()
    )
    rows = "".join(
        f'<tr><td><i style="background:{PARTS[name][1]}"></i>{PARTS[name][0]}</td><td>{duration(s)}</td>'
        f"<td>{s / wall_s:.1%}</td></tr>"
        for name, s in sorted(seconds.items(), key=lambda item: -item[1])
    )
    note = f"{duration(wall_s)} of wall time on the first rank, up to the end of the last phase"
    return _card("Where time went", note, f'<div class="bar">{bar}</div><table>{rows}</table>', wide=True)


def _time_columns(x: Sequence[float], groups: Sequence[Sequence[Phase]]) -> str:
    series = {PARTS[name][0]: [_seconds(g)[name] / len(g) for g in groups] for name in PARTS}
    return columns(x, series, form=lambda seconds: f"{short(seconds)} s", colors=dict(PARTS.values()))


def _lengths(groups: Sequence[Sequence[Phase]]) -> dict[str, Values]:
    names = ("mean", "p50", "p90", "p99")
    return {name: [_mean([p["lengths"].get(name) for p in group]) for group in groups] for name in names}


def _lengths_card(last: Phase) -> str:
    lengths = last["lengths"]
    note = f"tokens in a completion, the last phase, step {last['step']}"
    return _card("Lengths at the end", note, histogram(lengths.get("edges", ()), lengths.get("counts", ())))


def _tail(groups: Sequence[Sequence[Phase]]) -> dict[str, Values]:
    def tail(phase: Phase) -> float | None:
        seconds = phase["seconds"]
        generate_s = math.fsum(seconds.values()) - _outside(seconds)
        return (seconds["tail_busy"] + seconds["tail_idle"]) / generate_s if generate_s > 0 else None

    return {"tail": _means(groups, tail), "rows in use": _means(groups, "row_occupancy")}


def _gpu(groups: Sequence[Sequence[Phase]]) -> dict[str, Values]:
    series: dict[str, Values] = {
        "idle": _means(groups, "gpu_idle_frac"),
        "KV blocks in use": _means(groups, "kv_util"),
        "memory bandwidth (MBU)": _means(groups, "decode_mbu"),
        "arithmetic (MFU)": _means(groups, "decode_mfu"),
    }
    return {name: values for name, values in series.items() if any(value is not None for value in values)}


def _memory_columns(x: Sequence[float], groups: Sequence[Sequence[Phase]]) -> str:
    series = {
        name: [(_mean([p["memory_bytes"].get(key) for p in group]) or 0.0) / 2**30 for group in groups]
        for key, name in MEMORY.items()
    }
    return columns(x, series)


def _version_columns(x: Sequence[float], groups: Sequence[Sequence[Phase]]) -> str:
    series: dict[str, list[float]] = {"latest": [], "one ago": [], "two or more ago": []}
    for group in groups:
        by_lag = [0.0, 0.0, 0.0]
        for phase in group:
            for version, tokens in phase["versions"].items():
                by_lag[min(2, max(0, phase["policy_version"] - int(version)))] += tokens / len(group)
        for values, tokens in zip(series.values(), by_lag, strict=True):
            values.append(tokens)
    return columns(x, series)


def _reason_columns(x: Sequence[float], groups: Sequence[Sequence[Phase]]) -> str:
    reasons = sorted({reason for group in groups for phase in group for reason in phase["finish_reasons"]})
    return columns(
        x, {r: [sum(p["finish_reasons"].get(r, 0) for p in group) / len(group) for group in groups] for r in reasons}
    )


def _table_card(phases: Sequence[Phase]) -> str:
    def number(value: Any, form: Callable[[float], str] = short) -> str:
        return "–" if value is None else escape(form(value))

    heads = (
        "step",
        "",
        "reward",
        "completions",
        "tokens",
        "seconds",
        "tok/s",
        "idle",
        "rows",
        "KV",
        "p50",
        "p99",
        "version",
    )
    rows = [
        "<tr>"
        + "".join(f"<td>{cell}</td>" for cell in (
            number(p["step"]), escape(p["mode"]), number(p["reward"]), number(p["completions"]),
            number(p["generated_tokens"]), number(p["generate_s"]), number(p["generated_tok_s"]),
            number(p["gpu_idle_frac"], share), number(p["row_occupancy"], share), number(p["kv_util"], share),
            number(p["lengths"].get("p50")), number(p["lengths"].get("p99")), number(p["policy_version"]),
        ))
        + "</tr>"
        for p in phases
    ]  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in heads)
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f'<section class="card wide"><details><summary>All phases</summary>{table}</details></section>\n'


# Numbers


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{seconds * 1e3:.3g} ms"


def _seconds(phases: Sequence[Phase]) -> dict[str, float]:
    return {name: math.fsum(phase["seconds"].get(name, 0.0) for phase in phases) for name in PARTS}


def _outside(seconds: Mapping[str, float]) -> float:
    """Seconds that lie outside of generation."""
    return math.fsum(seconds[name] for name in ("exchange", "sleep", "wake", "learner"))


def _grouped(phases: Sequence[Phase]) -> tuple[list[float], list[Sequence[Phase]]]:
    """At most `POINTS` groups of neighbours, and the number of each one's last phase, counted from 1."""
    size = -(-len(phases) // POINTS)
    groups = [phases[i : i + size] for i in range(0, len(phases), size)]
    return [float(min((i + 1) * size, len(phases))) for i in range(len(groups))], groups


def _means(groups: Sequence[Sequence[Phase]], what: str | Callable[[Phase], float | None]) -> list[float | None]:
    read = what if callable(what) else lambda phase: phase.get(what)
    return [_mean([read(phase) for phase in group]) for group in groups]


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return math.fsum(there) / len(there) if there else None


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page, by default to RUN_DIR/report.html.

    Raises:
        ValueError: there is no phase to report.
    """
    phases = read_phases(run_dir)
    path = Path(out) if out else Path(run_dir) / "report.html"
    path.write_text(page(phases, title=Path(run_dir).resolve().name), encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rollout.observe.report", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help=f"a directory with {FILE}")
    parser.add_argument("--out", type=Path, help="the page; RUN_DIR/report.html by default")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir, args.out))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
