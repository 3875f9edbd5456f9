"""`Recorder`: what the engine tells about its time, to whoever listens. The engine imports no listener."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Recorder(Protocol):
    """What the engine tells about its time; `rollout.observe.timeline.Timeline` is one."""

    enabled: bool

    def host(self, name: str, step: int = -1) -> AbstractContextManager[None]:
        """A span of host work."""

    def device(self, lane: str, name: str, step: int, start_s: float, end_s: float) -> None:
        """A span of device work that has ended."""


class NoRecorder:
    """Records nothing."""

    enabled = False
    _nothing = nullcontext()

    def host(self, name: str, step: int = -1) -> AbstractContextManager[None]:
        """A span of host work."""
        return self._nothing

    def device(self, lane: str, name: str, step: int, start_s: float, end_s: float) -> None:
        """A span of device work that has ended."""
