"""Each layer's job runs exactly once, before the forward may go on with that layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hetero_connector.engine.layer_pipeline import LayerPipeline


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
        assert go.wait(10)
        done.set()

    pipeline.start([("a", slow)], overlap=True)
    assert started.wait(10)
    threading.Timer(0.05, go.set).start()
    pipeline.ensure("a")
    assert done.is_set()
    pipeline.drain()


def test_the_asker_copies_a_layer_the_thread_has_not_reached(pipeline: LayerPipeline) -> None:
    blocked, go = threading.Event(), threading.Event()
    threads: dict[str, str] = {}

    def first() -> None:
        blocked.set()
        assert go.wait(10)

    def second() -> None:
        threads["b"] = threading.current_thread().name

    pipeline.start([("a", first), ("b", second)], overlap=True)
    assert blocked.wait(10)
    pipeline.ensure("b")
    assert threads["b"] == threading.current_thread().name
    go.set()
    pipeline.ensure("a")
    pipeline.drain()


def test_what_a_job_raises_reaches_the_engine(pipeline: LayerPipeline) -> None:
    def broken() -> None:
        raise ValueError("boom")

    pipeline.start([("a", broken)], overlap=False)
    with pytest.raises(ValueError, match="boom"):
        pipeline.ensure("a")


def test_a_forward_that_skipped_a_layer_is_refused(pipeline: LayerPipeline) -> None:
    pipeline.start([("a", lambda: None), ("b", lambda: None)], overlap=False)
    pipeline.ensure("a")
    with pytest.raises(RuntimeError, match="'b'"):
        pipeline.drain()
