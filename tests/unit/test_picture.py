"""The picture's times against spans of known lengths, and what is drawn for them."""

import re
import sys

import numpy as np
import pytest

from rollout.observe.picture import BOTH, IDLE, WAITS, covered_s, intersection, picture, shares, union
from rollout.observe.scene import Scene
from rollout.observe.timeline import Timeline


class Script:
    """A clock that is moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def timeline(host: list[tuple[str, float, float]], compute: list[tuple[float, float]]) -> Timeline:
    """A timeline of these spans, in seconds."""
    clock = Script()
    made = Timeline(1 << 12, clock)
    for name, start_s, end_s in host:
        clock.now_s = start_s
        with made.host(name):
            clock.now_s = end_s
    for step, (start_s, end_s) in enumerate(compute):
        made.device("compute", "decode 4", step, start_s, end_s)
    return made


def in_turns(steps: int = 20) -> Timeline:
    """A step of 10 s: the GPU works for 7.5 of them, and the host for the rest."""
    host, compute = [], []
    for i in range(steps):
        host += [("fill", 10.0 * i, 10.0 * i + 2.5), ("wait", 10.0 * i + 2.5, 10.0 * i + 10.0)]
        compute.append((10.0 * i + 2.5, 10.0 * i + 10.0))
    return timeline(host, compute)


def overlapped(steps: int = 20) -> Timeline:
    """A step of 8 s, in which the GPU always works, and the host 2 s."""
    host, compute = [], []
    for i in range(steps):
        host += [("fill", 8.0 * i, 8.0 * i + 2.0), ("wait", 8.0 * i + 2.0, 8.0 * i + 8.0)]
        compute.append((8.0 * i, 8.0 * i + 8.0))
    return timeline(host, compute)


def spans(*pairs: tuple[float, float]) -> np.ndarray:
    return np.array(pairs, float).reshape(-1, 2)


def test_unions_and_intersections():
    np.testing.assert_array_equal(union(spans((5, 6), (0, 2), (1, 3), (3, 4), (7, 7))), [[0, 4], [5, 6]])
    np.testing.assert_array_equal(union(spans((0, 10), (2, 3), (11, 12))), [[0, 10], [11, 12]])
    np.testing.assert_array_equal(intersection(spans((0, 4), (5, 9)), spans((3, 6), (8, 12))), [[3, 4], [5, 6], [8, 9]])
    assert intersection(spans((0, 1)), spans((1, 2))).shape == (0, 2)
    assert intersection(spans(), spans((1, 2))).shape == (0, 2)


def test_covered_seconds_of_each_bin():
    found = covered_s(spans((1, 2.5), (3, 7)), np.array([0.0, 2.0, 4.0, 6.0, 8.0]))
    np.testing.assert_allclose(found, [1.0, 1.5, 2.0, 1.0])
    np.testing.assert_array_equal(covered_s(spans(), np.array([0.0, 1.0, 2.0])), [0.0, 0.0])


def test_shares_are_those_of_the_script():
    one = shares(in_turns())
    assert (one.both_s, one.host_waits_s, one.gpu_idle_s) == pytest.approx((0.0, 150.0, 19 * 2.5))
    assert one.idle_share == pytest.approx(in_turns().idle_share())
    two = shares(overlapped())
    assert (two.both_s, two.host_waits_s, two.gpu_idle_s) == pytest.approx((40.0, 120.0, 0.0))


def test_both_runs_are_drawn_with_seconds_and_idle_share():
    svg = picture([("in turns", in_turns()), ("overlapped", overlapped())], title="8B & more").to_svg()
    assert "8B &amp; more" in svg
    assert ">197.5 s, GPU idle 24.1%</text>" in svg
    assert ">160.0 s, GPU idle 0.00%</text>" in svg
    assert svg.count(">37.5 s less</text>") == 1  # there is room for it beside the shorter strip
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")


def boxes(svg: str, fill: str) -> list[tuple[float, float, float]]:
    """(left, top, width) of each rectangle of that colour."""
    found = []
    for d in re.findall(rf'<path d="M([^"]*)Z" fill="{fill}"/>', svg):
        points = [tuple(map(float, point.split())) for point in d.split("L")]
        if len(points) == 4:
            (x, y), (right, _) = points[0], points[1]
            found.append((x, y, right - x))
    return found


def test_the_enlarged_lanes_are_coloured_by_who_works():
    svg = picture([("in turns", in_turns())], title="", steps=4).to_svg()
    lanes = {y for _, y, _ in boxes(svg, WAITS)}
    host_y, gpu_y = sorted(lanes)[-2:]
    whole = 900 - 58 - 16
    step = whole / 4
    working = [width for _, y, width in boxes(svg, IDLE) if y == host_y]
    assert working == pytest.approx([step / 4] * 4, abs=0.1)  # at work while the GPU is idle
    assert sum(w for _, y, w in boxes(svg, WAITS) if y == gpu_y) == pytest.approx(whole * 0.75, abs=0.1)
    assert not [y for _, y, _ in boxes(svg, BOTH) if y in (host_y, gpu_y)]

    svg = picture([("overlapped", overlapped())], title="", steps=4).to_svg()
    green = [width for _, y, width in boxes(svg, BOTH) if y == host_y]
    assert green == pytest.approx([step / 4] * 4, abs=0.1)


def test_a_label_stands_on_one_colour():
    def labels(host_s: float) -> list[tuple[float, str]]:
        """(place, colour) of the label of a GPU step of 10 s, during whose first seconds the host works."""
        made = timeline([("update", 0.0, host_s), ("wait", host_s, 10.0)], [(0.0, 10.0)])
        svg = picture([("one", made)], title="").to_svg()
        return re.findall(r'<text x="([^"]*)"[^>]*fill="(#[^"]*)"[^>]*>decode</text>', svg)

    middle = str(58 + (900 - 58 - 16) // 2)
    assert labels(1.0) == [(middle, "#1f2328")]
    assert labels(9.0) == [(middle, "#fff")]
    assert labels(5.0) == []


def test_what_began_before_is_left_out():
    svg = picture([("in turns", in_turns())], title="", since_s=100.0).to_svg()
    assert ">97.5 s, GPU idle 23.1%</text>" in svg  # ten steps: nine gaps of 2.5 s
    with pytest.raises(ValueError, match="no device spans"):
        picture([("none left", in_turns())], title="", since_s=1000.0)


def test_an_empty_timeline_is_refused():
    with pytest.raises(ValueError, match="no device spans"):
        picture([("none", Timeline(4))], title="")


def test_a_single_step_is_drawn():
    assert "GPU idle 0.00%" in picture([("one", overlapped(1))], title="").to_svg()


def test_png_where_matplotlib_is_and_else_a_word_about_it(tmp_path, monkeypatch):
    scene = Scene(80, 40)
    scene.rect(0, 0, 40, 40, "#ff0000")
    scene.text(10, 10, "a")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        scene.write(tmp_path / "a.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    data = scene.write(tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (160, 80)
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        scene.write(tmp_path / "a.gif")
