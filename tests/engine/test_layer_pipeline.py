"""Each layer's job runs exactly once, before the forward continues with that layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hetero_connector.engine.worker import layer_pipeline
from hetero_connector.engine.worker.layer_pipeline import LayerPipeline
from tests.interleaving import at_each_step


@pytest.fixture
def pipeline() -> Iterator[LayerPipeline]:
    pipeline = LayerPipeline()
    yield pipeline
    pipeline.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_every_layer_runs_once_and_before_it_is_needed(
    pipeline: LayerPipeline, overlap: bool
) -> None:
    layers = [f"layer.{i}" for i in range(50)]
    ran: list[str] = []
    for _ in range(20):
        ran.clear()
        pipeline.start([(x, lambda x=x: ran.append(x)) for x in layers], overlap)
        for x in layers:
            pipeline.ensure(x)
            assert x in ran
        pipeline.drain()
        assert sorted(ran) == sorted(layers)


def test_a_layer_that_is_being_copied_is_waited_for(pipeline: LayerPipeline) -> None:
    started, go, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        assert go.wait(60)
        done.set()

    pipeline.start([("a", slow)], overlap=True)
    assert started.wait(60)
    threading.Timer(0.05, go.set).start()
    pipeline.ensure("a")
    assert done.is_set()
    pipeline.drain()


def test_the_forward_copies_a_layer_that_the_thread_has_not_reached(
    pipeline: LayerPipeline,
) -> None:
    blocked, go = threading.Event(), threading.Event()
    threads: dict[str, str] = {}

    def first() -> None:
        blocked.set()
        assert go.wait(60)

    def second() -> None:
        threads["b"] = threading.current_thread().name

    pipeline.start([("a", first), ("b", second)], overlap=True)
    assert blocked.wait(60)
    pipeline.ensure("b")
    assert threads["b"] == threading.current_thread().name
    go.set()
    pipeline.ensure("a")
    pipeline.drain()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_jobs_error_is_raised_by_drain_and_the_other_jobs_run(
    pipeline: LayerPipeline, overlap: bool
) -> None:
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("boom")

    for _ in range(2):
        pipeline.start([("a", broken), ("b", lambda: ran.append("b"))], overlap)
        pipeline.ensure("a")
        with pytest.raises(ValueError, match="boom"):
            pipeline.drain()
    pipeline.start([("c", lambda: ran.append("c"))], overlap)
    pipeline.drain()
    assert ran == ["b", "b", "c"]


def test_it_is_active_until_the_last_layer_is_copied(pipeline: LayerPipeline) -> None:
    """The forward asks at any moment of the other thread's work, and does not wait if it is not."""
    copied: list[str] = []
    too_early: list[list[str]] = []

    def ask() -> None:
        if len(copied) < 2 and not pipeline.active:
            too_early.append(list(copied))

    pipeline.start([(x, lambda x=x: copied.append(x)) for x in "ab"], overlap=False)
    with at_each_step(ask, layer_pipeline):
        pipeline.drain()
    assert copied == ["a", "b"]
    assert not too_early
    assert not pipeline.active


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_that_the_forward_leaves_out_is_copied_by_the_end(
    pipeline: LayerPipeline, overlap: bool
) -> None:
    ran: list[str] = []
    pipeline.start([(x, lambda x=x: ran.append(x)) for x in "ab"], overlap)
    pipeline.ensure("a")
    pipeline.drain()
    assert sorted(ran) == ["a", "b"]
    assert not pipeline.active


def test_without_a_second_thread_the_forward_copies(
    pipeline: LayerPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_to_be_had(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pipeline._executor, "submit", none_to_be_had)
    ran: list[str] = []
    pipeline.start([(x, lambda x=x: ran.append(x)) for x in "ab"], overlap=True)
    pipeline.ensure("b")
    assert ran == ["b"]
    pipeline.drain()
    assert ran == ["b", "a"]
