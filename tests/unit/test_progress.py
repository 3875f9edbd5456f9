"""The progress line on a scripted clock: how often, what it says, and who stays silent."""

import io

import pytest

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.calls import tokens_left
from rollout.observe import progress
from rollout.observe.progress import PhaseProgress, minutes
from tests.tiny_models import ragged_prompts, tiny


class Script:
    """A clock that is moved by hand."""

    now_s = 7.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_now_and_then_and_a_last_one():
    file, clock = io.StringIO(), Script()
    line = PhaseProgress(8, file=file, clock=clock)
    clock.now_s += 29.0
    assert not line.due()
    clock.now_s += 1.0
    assert line.due()
    line.show(2, 3000, rows=0.75, kv=0.5, tokens_left=12_000)
    assert not line.due()
    clock.now_s += 30.0
    line.show(5, 9000, rows=0.5, kv=0.25, tokens_left=6000)
    clock.now_s += 40.0
    line.close(8, 13_000)
    assert file.getvalue().splitlines() == [
        "generating: 2/8 completions, 100 tok/s, rows 75%, KV 50%, about 2:00 left",
        "generating: 5/8 completions, 200 tok/s, rows 50%, KV 25%, about 0:30 left",
        "generated: 8/8 completions, 13,000 tokens in 1:40, 130 tok/s",
    ]


def test_a_short_phase_leaves_a_log_file_alone():
    file, clock = io.StringIO(), Script()
    line = PhaseProgress(8, file=file, clock=clock)
    clock.now_s += 5.0
    line.close(8, 100)
    assert file.getvalue() == ""


def test_a_terminals_line_is_redrawn_and_goes():
    file, clock = Terminal(), Script()
    line = PhaseProgress(8, file=file, clock=clock)
    clock.now_s += 0.5
    assert line.due()
    line.show(2, 50, rows=1.0, kv=0.5, tokens_left=200)
    line.close(8, 100)
    written = file.getvalue()
    assert "\n" not in written
    assert "generating 2/8 |" in written
    assert "100 tok/s, rows 100%, KV 50%, about 0:02 left" in written
    assert written.endswith("\r")


def test_of_several_processes_the_first_speaks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    file, clock = Terminal(), Script()
    line = PhaseProgress(8, file=file, clock=clock)
    clock.now_s += 1e6
    assert not line.due()
    line.close(8, 100)
    assert file.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_times_are_read_at_a_glance(seconds, text):
    assert minutes(seconds) == text


def make(**options: bool) -> RolloutWorker:
    return RolloutWorker(
        tiny("llama"), EngineConfig(max_rows=2, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20), **options
    )


def test_a_worker_shows_its_phase_where_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "LOG_S", 0.0)
    asked = (ragged_prompts((5, 9, 7)), SamplingParams(max_tokens=6, ignore_eos=True))
    with make() as worker:
        silent = worker.generate(*asked)
        assert "generat" not in capsys.readouterr().err
    with make(progress=True) as worker:
        assert worker.generate(*asked) == silent
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("generat")]
    assert lines[0].startswith("generating: 0/3 completions, ")
    assert "rows 100%" in lines[1]
    assert lines[-1].startswith("generated: 3/3 completions, 18 tokens in 0:0")


def test_tokens_left_follow_the_length_estimate():
    with make() as worker:
        stream = worker.stream(ragged_prompts((5, 9, 7)), SamplingParams(max_tokens=8, ignore_eos=True))
        scheduler = worker.engine.scheduler
        next(stream)
        # two have ended with 8 tokens, one waits: it is expected to take as many, in whole blocks of 8
        assert scheduler.lengths.mean == 8.0
        assert 8 <= tokens_left(scheduler) <= 16
        list(stream)
        assert tokens_left(scheduler) == 0
