"""Streams and events, for CUDA and for the CPU, behind one small interface.

Three queues: `h2d` copies inputs in, `compute` runs the model, `d2h` copies outputs back. Work in a queue runs in
order; an edge between queues is an event, recorded on one and waited for on another. `InlineStreams` runs everything
at once where it is called, so the same loop serves a CPU.

It also keeps one clock: `Streams.seconds(event)` gives when the device passed an event, on the host's `perf_counter`.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A mark in a stream, passed when all work before it is done."""

    def synchronize(self) -> None:
        """Blocks the host until the mark is passed."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def record(self, event: Event) -> None:
        """Puts the mark at the queue's end."""

    def wait(self, event: Event) -> None:
        """Holds the queue, not the host, until the mark is passed."""

    def use(self) -> AbstractContextManager[object]:
        """Makes this the current stream."""


class Streams(Protocol):
    """The three queues of an engine and its events."""

    @property
    def h2d(self) -> Stream:
        """Copies inputs in."""

    @property
    def compute(self) -> Stream:
        """Runs the model."""

    @property
    def d2h(self) -> Stream:
        """Copies outputs back."""

    def event(self, *, in_graphs: bool = False) -> Event:
        """A new event.

        Args:
            in_graphs: whether graphs may hold its recording; each replay then passes it anew. Nothing may wait for it.
        """

    def mark(self, event: Event) -> None:
        """Puts the mark beside `compute`: passed when all before it there is done, and nothing behind it waits."""

    def join_marks(self) -> None:
        """Ends what `mark` began beside `compute`, as a capture must."""

    def seconds(self, event: Event) -> float:
        """When a passed event was passed, in seconds of `time.perf_counter`."""

    def follow_current(self) -> None:
        """Holds the queues until all that the caller's current stream holds is done."""

    def synchronize(self) -> None:
        """Blocks the host until all three queues are empty."""


class InlineEvent:
    """An event on a machine where work is done when the call returns."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class InlineStream:
    """A queue that is always empty."""

    def record(self, event: Event) -> None:
        """Notes the time."""
        assert isinstance(event, InlineEvent)
        event.passed_s = time.perf_counter()

    def wait(self, event: Event) -> None:
        """Nothing is ever outstanding."""

    def use(self) -> AbstractContextManager[object]:
        """There is one place where work runs."""
        return nullcontext()


class InlineStreams:
    """Streams for the CPU: work runs where it is called."""

    def __init__(self) -> None:
        self.h2d = InlineStream()
        self.compute = InlineStream()
        self.d2h = InlineStream()

    def event(self, *, in_graphs: bool = False) -> Event:
        """A new event."""
        return InlineEvent()

    def mark(self, event: Event) -> None:
        """Notes the time."""
        self.compute.record(event)

    def join_marks(self) -> None:
        """Nothing is ever outstanding."""

    def seconds(self, event: Event) -> float:
        """When the event was recorded."""
        assert isinstance(event, InlineEvent)
        return event.passed_s

    def follow_current(self) -> None:
        """Nothing is ever outstanding."""

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class CudaStream:
    """A non-default CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.raw = torch.cuda.Stream(device)

    def record(self, event: Event) -> None:
        """`cudaEventRecord`."""
        assert isinstance(event, torch.cuda.Event)
        event.record(self.raw)

    def wait(self, event: Event) -> None:
        """`cudaStreamWaitEvent`."""
        assert isinstance(event, torch.cuda.Event)
        self.raw.wait_event(event)

    def use(self) -> AbstractContextManager[object]:
        """Makes this the current stream of its device."""
        context: AbstractContextManager[object] = torch.cuda.stream(self.raw)
        return context


class CudaStreams:
    """The three streams of an engine on one GPU, and a branch of `compute` for marks that nothing waits for."""

    REANCHOR_S = 20.0
    """How long one anchor serves: CUDA gives the time between two events as a float32 of milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d = CudaStream(device)
        self.compute = CudaStream(device)
        self.d2h = CudaStream(device)
        self._beside = CudaStream(device)
        # an event on an idle device, and the host's time at it, tie the two clocks together
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(self.compute.raw)
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()
        self._next_anchor: torch.cuda.Event | None = None

    def event(self, *, in_graphs: bool = False) -> Event:
        """A new event, with a time stamp. Captured, a recording of an external one becomes a node of the graph."""
        return torch.cuda.Event(enable_timing=True, external=in_graphs)

    def mark(self, event: Event) -> None:
        """A branch beside `compute`: between two of its kernels, a recording takes 3 us of an H200's time."""
        self._beside.raw.wait_stream(self.compute.raw)
        self._beside.record(event)

    def join_marks(self) -> None:
        """An edge back from the branch."""
        self.compute.raw.wait_stream(self._beside.raw)

    def seconds(self, event: Event) -> float:
        """When the event was passed; moves the anchor along as time goes by, without waiting."""
        assert isinstance(event, torch.cuda.Event)
        passed_s = self._anchor_s + float(self._anchor.elapsed_time(event)) * 1e-3
        if passed_s - self._anchor_s > self.REANCHOR_S:
            self._move_anchor()
        return passed_s

    def _move_anchor(self) -> None:
        if self._next_anchor is None:
            self._next_anchor = torch.cuda.Event(enable_timing=True)
            self._next_anchor.record(self.compute.raw)
        elif self._next_anchor.query():
            self._anchor_s += self._anchor.elapsed_time(self._next_anchor) * 1e-3
            self._anchor, self._next_anchor = self._next_anchor, None

    def follow_current(self) -> None:
        """An edge from PyTorch's current stream to the three."""
        event = torch.cuda.current_stream(self.device).record_event()
        for stream in (self.h2d, self.compute, self.d2h):
            stream.wait(event)

    def synchronize(self) -> None:
        """Empties the three streams."""
        for stream in (self.h2d, self.compute, self.d2h):
            stream.raw.synchronize()


def wait_for_current(device: torch.device) -> None:
    """Blocks the host until PyTorch's current stream on `device` is empty. Off CUDA nothing is ever outstanding."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def make_streams(device: torch.device) -> Streams:
    """The streams that `device` has."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()
