"""Owns what lies between the engine, which ends requests in its own order, and callers, who each wait for their own.

`Mail` keeps ended requests, by call, until they are taken. `CallStream` is what a caller iterates over: unlike a plain
generator it survives being asked at a moment when the worker can't work.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator

from rollout.engine.scheduler import Ended
from rollout.types import Completion


class Mail:
    """Ended requests of each call that is open."""

    def __init__(self) -> None:
        self._outstanding: Counter[int] = Counter()  # requests of each call that haven't ended
        self._ended: defaultdict[int, deque[Ended]] = defaultdict(deque)

    @property
    def any_open(self) -> bool:
        """Whether any call is."""
        return bool(self._outstanding)

    def open(self, call: int, requests: int) -> None:
        """Expects so many requests of `call` to end."""
        self._outstanding[call] = requests

    def deliver(self, ended: list[Ended]) -> None:
        """Sorts ended requests by call. A call that was closed meanwhile wants none."""
        for one in ended:
            if one.request.call not in self._outstanding:
                continue
            self._outstanding[one.request.call] -= 1
            self._ended[one.request.call].append(one)

    def outstanding(self, call: int) -> int:
        """Requests of `call` that haven't ended."""
        return self._outstanding[call]

    def take(self, call: int) -> Ended | None:
        """The first of what has ended and wasn't taken; None: nothing."""
        return self._ended[call].popleft() if self._ended[call] else None

    def untaken(self, call: int) -> list[Ended]:
        """All that has ended and wasn't taken. It stays."""
        return list(self._ended[call])

    def waits(self, call: int) -> bool:
        """Whether the next of `call` has yet to be made by the engine."""
        return self._outstanding[call] > 0 and not self._ended[call]

    def close(self, call: int) -> None:
        """Takes all traces of a call away."""
        del self._outstanding[call]
        self._ended.pop(call, None)


class CallStream:
    """A call's completions. Asked for one while the worker can't work, it raises, and goes on when asked again.

    Args:
        completions: gives them; it has not begun.
        ready: raises if the worker can't work.
        waits: whether the next completion has yet to be made.
    """

    def __init__(
        self,
        completions: Generator[tuple[int, int, Completion], None, None],
        ready: Callable[[], object],
        waits: Callable[[], bool],
    ) -> None:
        self._completions = completions
        self._ready = ready
        self._waits = waits

    def __iter__(self) -> CallStream:
        return self

    def __next__(self) -> tuple[int, int, Completion]:
        state = inspect.getgeneratorstate(self._completions)
        if state == inspect.GEN_CREATED or (state != inspect.GEN_CLOSED and self._waits()):
            self._ready()
        return next(self._completions)

    def close(self) -> None:
        """Ends the call's requests."""
        self._completions.close()
