"""Owns the way of weights between processes: from a learner's to those that own an engine, in packed buckets.

All ranks of a process group take part, on NCCL or gloo. First each says what it has, and every rank compares: names,
shapes and dtypes agree, or all raise before the first byte is written. Then one bucket after another is broadcast and
copied into place, and at the end all agree that all went well. An error anywhere is raised everywhere.

A second model is never held: a rank holds one bucket, and the sender besides it the tensors that it makes for that
bucket. So what breaks off after the first bucket was written leaves a mixture, which the receiver's caller undoes (see
`rollout.weights.undo`), also where the group itself broke.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollout.engine.models.learner import Source, copy_pairs, distinct, sources
from rollout.engine.streams import wait_for_current
from rollout.weights.buckets import Piece, Plan, pack
from rollout.weights.manifest import Described, Spec, check, describe, differences

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class BroadcastReport:
    """What one `send` did."""

    tensors: int
    """Tensors sent. Tied weights count once."""
    sent_bytes: int
    """Bytes of them as they were sent, in the receivers' dtype where that is narrower."""
    buckets: int
    """Broadcasts that it took."""
    seconds: float
    """Wall-clock time, until every receiver had everything."""


class BroadcastSender:
    """The learner's end. Each process that holds a part of the learner has one; one of them broadcasts.

    Args:
        learner: what is sent, as in `WeightExchange.exchange`: wrapped, adapted or sharded.
        group: whose ranks are the learner's processes (all that a sharded learner has; one is enough of a replicated
            one) and the receivers, no others. None: the default group.
        src: the rank within `group` that broadcasts; the same on all.
        bucket_bytes: bound of what one broadcast carries. Rows of a tensor stay whole, and a wider row makes a bucket
            of its own.
    """

    def __init__(
        self,
        learner: nn.Module,
        group: dist.ProcessGroup | None = None,
        src: int = 0,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
        self._learner = learner
        self._link = _Link(group, src)
        self._bucket_bytes = bucket_bytes

    def send(self) -> BroadcastReport:
        """Brings the learner's weights into every receiver's engine; every rank of the group has to take part.

        Runs on the current stream, as `WeightExchange.exchange`, and returns when all have arrived.

        Raises:
            ValueError: the learner can't be read, or a receiver's tensors are others. Nothing was written anywhere.
            RuntimeError: an error on some rank, with this one's own as its cause. The receivers' workers go on with the
                old weights.
        """
        start_s = time.perf_counter()
        try:
            named = distinct(sources(self._learner))
        except Exception as error:
            self._link.decline("send", error)
            raise
        device = next(source.device for source in named.values())
        plan = self._link.agree("send", named, device, self._bucket_bytes)
        failure = self._send(plan, named, self._link.new_bucket(plan))
        failures = self._link.settle(failure)
        if failures:
            raise RuntimeError(f"sending the weights broke off: {failures}") from failure
        return BroadcastReport(len(named), plan.bytes, len(plan.buckets), time.perf_counter() - start_s)

    @torch.no_grad()
    def _send(self, plan: Plan, named: Mapping[str, Source], bucket: Tensor) -> Exception | None:
        failure: Exception | None = None
        sends = self._link.rank == self._link.src
        name: str | None = None  # of the tensor that is being sent, which may go on in the next bucket
        value: Tensor | None = None  # None: it can't be read
        for pieces in plan.buckets:
            pairs: list[tuple[Tensor, Tensor]] = []
            for piece in pieces:
                # NOTE: after an error the bucket is read to its end, for other ranks gather what this one must too.
                try:
                    if name != piece.name:
                        name, value = piece.name, None
                        value = _value(named[name])
                    if value is not None:
                        pairs.append((piece.within(bucket), piece.of(value)))
                except Exception as error:
                    failure = failure or error
            if sends:
                try:
                    if failure is None:
                        copy_pairs(pairs)
                except Exception as error:
                    failure = error
                bucket[0] = failure is not None
            if self._link.pass_on(bucket, pieces):
                break
        return failure


class BroadcastReceiver:
    """The engine's end: give it to `RolloutWorker.exchange` while the learner's processes call `BroadcastSender.send`.

    Where the engine shares storage with the model that it was built from, that model takes the new weights too.

    Args:
        group: as the sender's.
        src: as the sender's.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, src: int = 0) -> None:
        self._link = _Link(group, src)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Around all that leads to `receive`: if that is never reached, the others are told instead of left waiting."""
        agreed = self._link.agreements
        try:
            yield
        except Exception as error:
            if self._link.agreements == agreed:
                self._link.decline("receive", error)
            raise

    @torch.no_grad()
    def receive(self, targets: Mapping[str, Tensor], before_writing: Callable[[], None]) -> int:
        """Fills `targets` in place, on the current stream; returns the bytes written.

        Args:
            targets: the engine's tensors by their plain names.
            before_writing: called before the first byte is written; if it raises, none is.

        Raises:
            ValueError: the learner's tensors are others, or another receiver's. Nothing was written anywhere.
            RuntimeError: an error on some rank. If `before_writing` returned, the targets hold a mixture.
        """
        plan = self._link.agree("receive", targets, next(iter(targets.values())).device)
        bucket = self._link.new_bucket(plan)
        failure: Exception | None = None
        for index, pieces in enumerate(plan.buckets):
            if self._link.pass_on(bucket, pieces):
                break
            if failure is not None:
                continue  # the others' broadcasts need this rank all the same
            try:
                if index == 0:
                    before_writing()
                copy_pairs([(piece.of(targets[piece.name]), piece.within(bucket)) for piece in pieces])
            except Exception as error:
                failure = error
        failures = self._link.settle(failure)
        if failures:
            raise RuntimeError(f"receiving the weights broke off: {failures}") from failure
        return sum(target.nbytes for target in targets.values())


@dataclass(frozen=True)
class _Entry:
    """What one rank tells the others before anything moves."""

    role: str  # "send" or "receive"
    src: int
    specs: dict[str, Spec] = field(default_factory=dict)
    on_cuda: bool = False
    bucket_bytes: int = 0
    declined: str | None = None


class _Link:
    """The group as one rank sees it."""

    def __init__(self, group: dist.ProcessGroup | None, src: int) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group that the weights go through")
        self.src = src
        self.agreements = 0
        self._device: torch.device | None = None

    def agree(self, role: str, tensors: Mapping[str, Described], device: torch.device, bucket_bytes: int = 0) -> Plan:
        """Compares what all ranks have. All see the same entries, so all come to the same: a plan, or an error."""
        self._device = device
        entries = self._gather(_Entry(role, self.src, describe(tensors), device.type == "cuda", bucket_bytes))
        _check_entries(entries)
        wire = _wire_specs(entries)
        sender = entries[self.src]
        return Plan(pack(wire, sender.bucket_bytes), self._bucket_device(entries, device))

    def decline(self, role: str, error: BaseException) -> None:
        """Tells the others that this rank can't take part."""
        self._gather(_Entry(role, self.src, declined=f"{type(error).__name__}: {error}"))

    def new_bucket(self, plan: Plan) -> Tensor:
        """A bucket of the plan's size. Raises RuntimeError on every rank if one has no memory for it."""
        bucket: Tensor | None = None
        failure: Exception | None = None
        try:
            bucket = torch.empty(plan.bucket_bytes, dtype=torch.uint8, device=plan.device)
        except Exception as error:
            failure = error
        failures = self.settle(failure)
        if bucket is None or failures:
            raise RuntimeError(
                f"there is no room for a bucket of weights; nothing was written: {failures}"
            ) from failure
        return bucket

    def pass_on(self, bucket: Tensor, pieces: list[Piece]) -> bool:
        """Broadcasts a bucket; returns whether the sender's reading broke off, so that it holds nothing of use."""
        if bucket.device != self._device and self._device is not None:
            # Copies between the GPU and a bucket on the host end before it is sent, or written again.
            wait_for_current(self._device)
        dist.broadcast(bucket[: pieces[-1].end], group=self.group, group_src=self.src)
        return bool(bucket[0])

    def settle(self, failure: Exception | None) -> str:
        """Waits until all ranks are through; what went wrong, on whichever."""
        if failure is None and self._device is not None:
            wait_for_current(self._device)
        told = self._gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        return "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(told) if error is not None)

    def _gather(self, mine: Any) -> list[Any]:
        self.agreements += 1
        everyones: list[Any] = [None] * dist.get_world_size(self.group)
        # NCCL carries objects on the current device.
        on_device = self._device is not None and self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_device else nullcontext():
            dist.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def _bucket_device(self, entries: list[_Entry], device: torch.device) -> torch.device:
        backends = str(dist.get_backend_config(self.group))
        if "nccl" not in backends:
            return torch.device("cpu")
        if all(entry.on_cuda for entry in entries):
            return device
        if "gloo" in backends:
            return torch.device("cpu")
        raise ValueError("weights that lie on the CPU can't go through NCCL: use a group with gloo")


def _check_entries(entries: list[_Entry]) -> None:
    """Raises on every rank what any rank's entry gives reason for."""
    declined = [f"rank {rank}: {e.declined}" for rank, e in enumerate(entries) if e.declined is not None]
    if declined:
        raise RuntimeError(f"weights weren't sent, for not every rank could take part ({'; '.join(declined)})")
    srcs = {entry.src for entry in entries}
    if len(srcs) > 1:
        raise ValueError(f"the ranks don't agree on src, which is any of {sorted(srcs)}: give all the same")
    src = srcs.pop()
    if not 0 <= src < len(entries) or entries[src].role != "send":
        raise ValueError(f"src={src} is no rank of the group that sends: give the sender's rank within the group")
    receivers = {rank: entry for rank, entry in enumerate(entries) if entry.role == "receive"}
    if not receivers:
        raise ValueError("no rank of the group receives: there has to be one with an engine")
    sent = entries[src].specs
    for rank, entry in enumerate(entries):
        if entry.role == "send" and entry.specs != sent:
            raise ValueError(
                f"the learner's tensors differ between ranks {src} and {rank}: {differences(sent, entry.specs)}"
            )
    for rank, entry in receivers.items():
        try:
            check(entry.specs, sent)
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None


def _wire_specs(entries: list[_Entry]) -> dict[str, Spec]:
    """The sender's tensors, in the receivers' dtype where that is one and narrower than the sender's."""
    src = entries[entries[0].src]
    receivers = [entry.specs for entry in entries if entry.role == "receive"]
    wire: dict[str, Spec] = {}
    for name, (shape, dtype) in src.specs.items():
        wanted = {specs[name].dtype for specs in receivers}
        narrower = len(wanted) == 1 and (only := next(iter(wanted))).itemsize < dtype.itemsize
        wire[name] = Spec(shape, only if narrower else dtype)
    return wire


def _value(source: Source) -> Tensor:
    return source.read() if source.owner is None else source.owner.detach()
