"""The recipe that holds the engine against a model's own forward, on a CPU."""

import json

import pytest

from recipes import agreement


@pytest.mark.parametrize(("dtype", "same", "near"), [("float32", 1.0, 1e-4), ("bfloat16", 0.9, 0.05)])
def test_the_engine_agrees_with_the_models_own_forward(dtype, same, near, capsys):
    report = agreement.main(f"--model tiny --device cpu --rows 9 --new 24 --dtype {dtype}".split())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert list(report["results"]) == ["fused", "module"]
    for figures in report["results"].values():
        assert figures["tokens"] == 8 * 24, "a prompt that is repeated counts once"
        assert same <= figures["same"] <= 1.0
        assert same <= figures["same_f32"] <= 1.0
        assert max(figures["logprob"], figures["logprob_f32"], figures["own_logprob_f32"]) < near
        assert 0.0 <= figures["short_f32"] < near
        assert (figures["own_logprob_f32"] == 0.0) == (dtype == "float32")


def test_a_senseless_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        agreement.main(["--new", "0"])
    assert "at least 1" in capsys.readouterr().err
