"""Owns the exchange of weights: from a learner in the same process, or by broadcast, into an engine's module.

Every name and shape is checked before the first byte is written; the module's addresses never change, so CUDA graphs
stay valid. A learner whose tensors lie whole on the engine's device is copied last and at once, which only a broken
device could interrupt. What has to be made first (merged, gathered, received) may fail at any piece: then all is put
back (see `rollout.weights.undo`). So an exchange happens whole or not at all. Refuses to write over storage that its
owner still uses. Counting versions, draining the engine before and dropping cached prefixes after are the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.engine.models.learner import Source, distinct, same_storage, sources, weights, write
from rollout.engine.streams import wait_for_current
from rollout.weights.broadcast import BroadcastReceiver
from rollout.weights.manifest import NAMED, check
from rollout.weights.undo import Undo


@dataclass(frozen=True)
class ExchangeReport:
    """What one exchange did. Tied weights count once."""

    shared: int
    """Tensors whose storage engine and learner share: nothing to move."""
    copied: int
    """Tensors copied in place."""
    copied_bytes: int
    """Bytes written by those copies."""
    seconds: float
    """Wall-clock time, to the end of the last copy."""
    copy_seconds: float = 0.0
    """Of these, the device's for copying what lay whole on it: what the bytes take, without finding them."""
    rebound: int = 0
    """Those of `copied` that were shared until the learner moved to other storage (`module.to`, `assign=True`)."""


class WeightExchange:
    """Brings the weights of a learner into a module that `build_module` made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._torn = False

    @property
    def intact(self) -> bool:
        """False if an exchange broke off and couldn't be undone, until one ends: the weights are a mixture.

        No known error leads there, other than a device that refuses every call.
        """
        return not self._torn

    @property
    def shares(self) -> bool:
        """Whether any tensor is the learner's own storage, which its in-place steps change without an exchange."""
        return bool(self._origins)

    def broken_ties(self) -> list[str]:
        """Names of the shared tensors whose owner lives on in other storage: only an exchange finds it there."""
        targets = _targets(self._module)
        return [n for n, owner in self._owners().items() if owner is not None and not same_storage(targets[n], owner)]

    def exchange(self, learner: nn.Module | BroadcastReceiver, undo: Undo | None = None) -> ExchangeReport:
        """Makes the module's weights the learner's, in place, and waits until they have arrived.

        Runs on the current stream, which must be the one that the learner's last step ran on, or wait for it. No step
        of the engine may be in flight. Of a sharded learner (FSDP, ZeRO-3), every rank has to call it.

        Args:
            learner: the model that the module was built from, wrapped or not, or another one of the same tensors; or
                the receiver of a learner that other processes send.
            undo: where old values are put aside meanwhile; None: wherever there is room.

        Raises:
            ValueError: tensors are missing, extra or misshapen, or a copy would overwrite a model that is still in use.
                Nothing was written.
            RuntimeError: reading the learner failed, with the cause, or some rank of a broadcast failed. The weights
                are those from before, whole. Of a sharded learner, each rank says and undoes what failed on it.
        """
        undo = undo or Undo()
        if isinstance(learner, BroadcastReceiver):
            return self._receive(learner, undo)
        start_s = time.perf_counter()
        targets = _targets(self._module)
        named = distinct(sources(learner))
        check(targets, named)
        shared, copies, rebound = self._sort(targets, named)
        clock = _Clock(next(iter(targets.values())).device)
        copied_bytes = self._write(copies, undo, clock)
        for name in rebound:
            del self._origins[name]
        _synchronize(targets.values())
        return ExchangeReport(
            shared=shared,
            copied=len(copies),
            copied_bytes=copied_bytes,
            seconds=time.perf_counter() - start_s,
            copy_seconds=clock.seconds(),
            rebound=len(rebound),
        )

    def _receive(self, receiver: BroadcastReceiver, undo: Undo) -> ExchangeReport:
        start_s = time.perf_counter()
        targets = _targets(self._module)
        with self._whole_or_not_at_all(undo):
            copied_bytes = receiver.receive(targets, before_writing=lambda: undo.save(targets.values()))
        self._torn = False
        # What its owner has left behind is the engine's own from now on.
        for name, owner in self._owners().items():
            if owner is None or not same_storage(targets[name], owner):
                del self._origins[name]
        return ExchangeReport(0, len(targets), copied_bytes, time.perf_counter() - start_s)

    @contextmanager
    def _whole_or_not_at_all(self, undo: Undo) -> Iterator[None]:
        """Undoes what its body wrote if that breaks off, whatever the reason: an interrupt from the keyboard, too."""
        torn = self._torn
        try:
            yield
        except BaseException as error:
            if not undo.begun:
                raise
            self._torn = True  # in case that it can't be undone
            undo.restore()
            trained = any(owner is not None and owner.requires_grad for owner in self._owners().values())
            self._torn = torn or trained
            if not isinstance(error, Exception):
                raise
            state = (
                "but weights that learner and engine share were trained meanwhile: exchange again before generating"
                if trained
                else "so the old weights are whole"
            )
            raise RuntimeError(f"the weight exchange broke off half-way and was undone, {state}: {error}") from error
        finally:
            undo.close()

    @property
    def _origins(self) -> dict[str, Callable[[], Tensor | None]]:
        origins: dict[str, Callable[[], Tensor | None]] = self._module.__dict__.setdefault("_rollout_origins", {})
        return origins

    def _owners(self) -> dict[str, Tensor | None]:
        """Of each shared tensor the learner's own, or None if that is gone."""
        return {name: reference() for name, reference in self._origins.items()}

    def _sort(
        self, targets: dict[str, Tensor], named: dict[str, Source]
    ) -> tuple[int, list[tuple[Tensor, Source]], list[str]]:
        """How many are shared, which are to be copied, and the names of those that were shared until now."""
        copies: list[tuple[Tensor, Source]] = []
        rebound: list[str] = []
        in_use: list[str] = []
        for name, source in named.items():
            target = targets[name]
            if source.owner is not None and same_storage(target, source.owner):
                continue
            copies.append((target, source))
            if name in self._origins:
                owner = self._origins[name]()
                still_used = owner is not None and same_storage(target, owner)
                (in_use if still_used else rebound).append(name)
        if in_use:
            raise ValueError(
                f"the engine runs on the storage of the model it was built from, and this exchange would write other "
                f"values into {len(in_use)} tensors of that model ({', '.join(in_use[:NAMED])}): pass the same model, "
                "or build the worker from the model (and the adapters) that you train"
            )
        return len(named) - len(copies), copies, rebound

    def _write(self, copies: list[tuple[Tensor, Source]], undo: Undo, clock: _Clock) -> int:
        there: list[tuple[Tensor, Source]] = []
        made: list[tuple[Tensor, Source]] = []
        for target, source in copies:
            (there if source.owner is not None and source.device == target.device else made).append((target, source))
        if made:
            with self._whole_or_not_at_all(undo):
                undo.save(target for target, _ in made)
                write(made)
                _synchronize([target for target, _ in made])
        if there:
            self._torn = True
            try:
                with clock.running():
                    write(there)
            except Exception as error:  # all was checked, so the device refuses
                raise RuntimeError(
                    "copying weights broke off half-way, which leaves a mixture of two versions"
                ) from error
        self._torn = False
        return sum(target.nbytes for target, _ in copies)


class _Clock:
    """How long the current stream's device is busy with a piece of work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: Callable[[], float] = lambda: 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures what its body enqueues."""
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            yield
            taken_s = time.perf_counter() - start_s
            self._seconds = lambda: taken_s
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        start.record(stream)
        yield
        end.record(stream)
        self._seconds = lambda: float(start.elapsed_time(end)) * 1e-3

    def seconds(self) -> float:
        """Of the work, which has ended; 0 if there was none."""
        return self._seconds()


def _targets(module: nn.Module) -> dict[str, Tensor]:
    # Read anew each time: the module's parameters may have become views of fused storage since it was built.
    return {name: tensor.detach() for name, tensor in weights(module).items()}


def _synchronize(targets: Iterable[Tensor]) -> None:
    for device in {target.device for target in targets}:
        wait_for_current(device)
