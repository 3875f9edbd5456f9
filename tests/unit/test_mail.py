"""Mail: whose completion is whose, and when a caller waits for the engine."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from rollout.engine.scheduler import Ended
from rollout.mail import CallStream, Mail
from rollout.types import Request, SamplingParams


def ended(call: int, sample: int) -> Ended:
    request = Request((1, 2), SamplingParams(), (0, 0), group=0, sample=sample, call=call)
    return Ended(request, completion=None)  # type: ignore[arg-type]


def test_each_call_gets_its_own_in_the_order_they_ended() -> None:
    mail = Mail()
    mail.open(1, 2)
    mail.open(2, 1)
    assert mail.waits(1) and mail.waits(2)
    first, other, second = ended(1, 1), ended(2, 0), ended(1, 0)
    mail.deliver([first, other])
    assert (mail.outstanding(1), mail.outstanding(2)) == (1, 0)
    assert not mail.waits(1), "one lies there already"
    assert mail.take(1) is first
    assert mail.waits(1)
    assert mail.take(1) is None
    assert not mail.waits(2)
    mail.deliver([second])
    assert mail.untaken(1) == [second]
    assert mail.take(1) is second
    assert not mail.waits(1), "there is nothing to wait for"
    mail.close(1)
    assert mail.any_open
    assert mail.take(2) is other
    mail.close(2)
    assert not mail.any_open


def test_a_stream_asked_at_the_wrong_moment_goes_on_later() -> None:
    log: list[str] = []
    works, waits = [False], [True]

    def ready() -> None:
        log.append("asked")
        if not works[0]:
            raise RuntimeError("asleep")

    def completions() -> Generator[tuple[int, int, Any], None, None]:
        yield 0, 0, "a"
        yield 0, 1, "b"

    stream = CallStream(completions(), ready, lambda: waits[0])
    with pytest.raises(RuntimeError, match="asleep"):
        next(stream)
    works[0] = True
    assert next(stream)[2] == "a"
    works[0] = False
    with pytest.raises(RuntimeError, match="asleep"):
        next(stream)
    waits[0] = False  # the next one lies there: no engine is needed for it
    assert next(stream)[2] == "b"
    assert list(stream) == []
    assert log == ["asked"] * 3
