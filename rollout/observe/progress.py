"""One line that says how far a phase is: redrawn on a terminal and in a notebook, now and then a new one in a log file.

Owns when and how it is shown; of several processes only the first shows anything. Refuses to look into an engine:
numbers are handed in.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm.auto import tqdm

REDRAW_S, LOG_S = 0.5, 30.0
"""Seconds between two states of the line on a terminal, and between two lines in a log file."""


class PhaseProgress:
    """The line of one phase. Ask `due` at each step, and `show` where it is.

    Args:
        completions: how many the phase makes.
        file: where the line goes; standard error by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self, completions: int, *, file: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.completions = completions
        self._file = file or sys.stderr
        self._clock = clock
        self._start_s = self._last_s = clock()
        self._tokens = 0
        self._bar: Any = None
        shown = os.environ.get("RANK", "0") == "0"
        if shown and (_in_notebook() or self._file.isatty()):
            form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
            self._bar = tqdm(total=completions, desc="generating", bar_format=form, leave=False, file=self._file)
        self._every_s = (REDRAW_S if self._bar is not None else LOG_S) if shown else math.inf

    def due(self) -> bool:
        """Whether the line is old enough for a new state."""
        return self._clock() - self._last_s >= self._every_s

    def show(self, done: int, tokens: int, *, rows: float, kv: float, tokens_left: float) -> None:
        """A new state.

        Args:
            done: completions that have ended.
            tokens: generated since the phase began.
            rows: share of the rows that hold a sequence.
            kv: share of the KV blocks in use.
            tokens_left: expected until all have ended.
        """
        now_s = self._clock()
        tok_s = (tokens - self._tokens) / max(now_s - self._last_s, 1e-9)
        self._last_s, self._tokens = now_s, tokens
        state = f"{tok_s:,.0f} tok/s, rows {rows:.0%}, KV {kv:.0%}"
        if tok_s > 0:
            state += f", about {minutes(tokens_left / tok_s)} left"
        if self._bar is None:
            print(f"generating: {done:,}/{self.completions:,} completions, {state}", file=self._file, flush=True)
        else:
            self._bar.n = done
            self._bar.set_postfix_str(state)

    def close(self, done: int, tokens: int) -> None:
        """The phase has ended. A terminal's line goes; a log file gets a last one, if it has got any before."""
        if self._bar is not None:
            self._bar.close()
        elif self._last_s > self._start_s:
            seconds = self._clock() - self._start_s
            print(
                f"generated: {done:,}/{self.completions:,} completions, {tokens:,} tokens in {minutes(seconds)}, "
                f"{tokens / max(seconds, 1e-9):,.0f} tok/s",
                file=self._file,
                flush=True,
            )


def minutes(seconds: float) -> str:
    """As m:ss, or h:mm:ss."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _in_notebook() -> bool:
    return any("notebook" in kind.__module__ for kind in tqdm.__mro__)
