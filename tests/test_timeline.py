"""A timeline is written as Perfetto reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.timeline import Activity, Timeline
from tests.chrome_trace import Slice, assert_nested, read_trace

TIMES = st.tuples(
    st.floats(0, 1e3, allow_nan=False), st.floats(0, 10), st.sampled_from(("engine", "requests"))
)


def test_activities_are_slices_on_tracks_with_names(tmp_path: Path) -> None:
    timeline = Timeline()
    parts = [("load", 100.5, 101.0), ("prefill", 100.5, 102.0)]
    timeline.add("a", Activity("requests", "r", 100.0, 102.0, {"tokens": 7}, parts))
    timeline.add("b", Activity("engine", "step", 101.0, 101.5))
    timeline.write(tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == [
        Slice("a", "requests", "r", 0.0, 2e6, {"tokens": 7}),
        Slice("a", "requests", "prefill", 5e5, 2e6, {}),
        Slice("a", "requests", "load", 5e5, 1e6, {}),
        Slice("b", "engine", "step", 1e6, 1.5e6, {}),
    ]


def test_overlapping_activities_are_on_lanes_of_their_own(tmp_path: Path) -> None:
    timeline = Timeline()
    for begin_s, end_s in ((2.0, 3.0), (0.0, 2.0), (1.0, 2.5)):
        timeline.add("a", Activity("requests", f"from {begin_s}", begin_s, end_s))
    timeline.write(tmp_path / "t.json")
    lanes = {x.name: x.track for x in read_trace(tmp_path / "t.json")}
    assert lanes == {"from 0.0": "requests", "from 1.0": "requests 2", "from 2.0": "requests"}


@given(st.lists(TIMES, max_size=40))
def test_no_slice_overlaps_another(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[float, float, str]]
) -> None:
    timeline = Timeline()
    for begin_s, seconds, track in times:
        half_s = begin_s + seconds / 2
        parts = [("first", begin_s - 1, half_s), ("last", half_s, begin_s + seconds + 1)]
        timeline.add("a", Activity(track, "x", begin_s, begin_s + seconds, {}, parts))
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    timeline.write(path)
    assert len(read_trace(path)) == 3 * len(times)


def test_the_check_finds_slices_that_overlap() -> None:
    one, other = (Slice("a", "t", "x", begin, begin + 2, {}) for begin in (0.0, 1.0))
    with pytest.raises(AssertionError):
        assert_nested([one, other])
