"""Counters add, gauges replace, samples collect; a drain starts anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.metrics import Recorder, merge, metric_key, split_key

NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)


@given(NAMES, st.dictionaries(NAMES, NAMES, max_size=4))
def test_a_key_gives_back_its_name_and_labels(name: str, labels: dict[str, str]) -> None:
    assert split_key(metric_key(name, labels)) == (name, labels)


def test_label_order_does_not_make_another_series() -> None:
    recorder = Recorder()
    recorder.add("n", a="1", b="2")
    recorder.add("n", 2, b="2", a="1")
    payload = recorder.drain()
    assert payload is not None
    assert payload["counters"] == {"n{a=1,b=2}": 3}


def test_draining_empties() -> None:
    recorder = Recorder()
    recorder.observe("t", 0.5)
    assert recorder.drain() is not None
    assert recorder.drain() is None


def test_samples_are_bounded() -> None:
    recorder = Recorder()
    for _ in range(5000):
        recorder.observe("t", 0.5)
    payload = recorder.drain()
    assert payload is not None
    assert len(payload["histograms"]["t{}"]) == 1024


def test_merging_adds_counters_and_lets_the_newer_gauge_win() -> None:
    one, other = Recorder(), Recorder()
    for recorder, value in ((one, 1), (other, 2)):
        recorder.add("c", value)
        recorder.set("g", value)
        recorder.observe("t", value)
    merged = merge(one.drain() or {}, other.drain() or {})
    assert merged == {"counters": {"c{}": 3}, "gauges": {"g{}": 2}, "histograms": {"t{}": [1, 2]}}


def test_a_gauge_that_has_not_changed_is_no_news() -> None:
    """Else an idle engine would step every second to report what is known."""
    recorder = Recorder()
    for value, is_news in ((1.0, True), (1.0, False), (2.0, True), (2.0, False)):
        recorder.set("heterocache_io_alive", value)
        assert recorder.has_news() is is_news
        assert recorder.drain() is not None
    recorder.add("heterocache_hits")
    assert recorder.has_news()
