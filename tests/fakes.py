"""Stand-ins for the device: streams that write down what was asked of them, and a model that needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollout.engine.graphs import GraphKey, GraphPool
from rollout.engine.streams import Event


class FakeEvent:
    """An event with a name; waiting for it on the host is written down."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log = log
        self.name = name

    def synchronize(self) -> None:
        self.log.append(f"host waits {self.name}")


class FakeStream:
    """A queue that writes down what is put into it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def record(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.log.append(f"{self.name} records {event.name}")

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.log.append(f"{self.name} waits {event.name}")

    @contextmanager
    def use(self) -> Iterator[None]:
        self.log.append(f"{self.name}:")
        yield


def noted_replays(graphs: GraphPool) -> list[GraphKey]:
    """The keys of the graphs that `graphs` replays from now on."""
    replay = graphs.replay
    replayed: list[GraphKey] = []

    def noted(key: GraphKey) -> None:
        replayed.append(key)
        replay(key)

    graphs.replay = noted  # type: ignore[method-assign]
    return replayed


class FakeStreams:
    """`rollout.engine.streams.Streams` for a test that reads the order of events."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.h2d = FakeStream("h2d", self.log)
        self.compute = FakeStream("compute", self.log)
        self.d2h = FakeStream("d2h", self.log)

    def event(self, *, in_graphs: bool = False) -> FakeEvent:
        return FakeEvent(self.log)

    def mark(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.log.append(f"beside compute: {event.name}")

    def join_marks(self) -> None:
        self.log.append("compute waits for what is beside")

    def seconds(self, event: Event) -> float:
        return 0.0

    def follow_current(self) -> None:
        self.log.append("all wait current")

    def synchronize(self) -> None: ...


class Launches:
    """Stands in for a Triton kernel, launches it if it is given, and keeps the options that it was launched with."""

    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.options.append(options)
            return self.kernel[grid](*args, **options) if self.kernel is not None else None

        return launch
