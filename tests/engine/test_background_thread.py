"""Jobs run in order on one thread; a job that never ends does not block the caller."""

from __future__ import annotations

import threading

import pytest

from hetero_connector.engine.scheduler import background_thread
from hetero_connector.engine.scheduler.background_thread import BackgroundThread


def test_jobs_run_in_order_and_bring_results_or_errors() -> None:
    thread = BackgroundThread("test")
    seen: list[int] = []

    def fail() -> None:
        raise OSError("gone")

    def last_job() -> str:
        seen.append(2)
        return "done"

    first = thread.submit(lambda: seen.append(1))
    failing = thread.submit(fail)
    last = thread.submit(last_job)
    assert first is not None
    assert failing is not None
    assert last is not None
    assert last.result(60) == "done"
    assert seen == [1, 2]
    assert isinstance(failing.exception(), OSError)
    assert thread.busy_s == 0.0
    thread.close()


def test_a_job_that_never_ends_is_seen_to_be_late_and_fills_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_thread, "_MAX_JOBS", 3)
    now, begun, release = 100.0, threading.Event(), threading.Event()
    thread = BackgroundThread("test", lambda: now)

    def hang() -> bool:
        begun.set()
        return release.wait(60.0)

    hung = thread.submit(hang)
    assert begun.wait(60)
    now = 107.0
    assert thread.busy_s == 7.0
    waiting = [thread.submit(int) for _ in range(4)]
    assert waiting[3] is None
    assert not any(job.done() for job in waiting if job is not None)
    release.set()
    assert hung is not None
    assert hung.result(60)
    assert waiting[2] is not None
    assert waiting[2].result(60) == 0
    assert thread.busy_s == 0.0
    thread.close()


def test_a_job_that_was_cancelled_before_its_turn_is_left_out() -> None:
    thread, release, seen = BackgroundThread("test"), threading.Event(), list[int]()
    hung = thread.submit(lambda: release.wait(60.0))
    cancelled = thread.submit(lambda: seen.append(1))
    last = thread.submit(lambda: seen.append(2))
    assert hung is not None
    assert cancelled is not None
    assert last is not None
    assert cancelled.cancel()
    release.set()
    last.result(60)
    assert seen == [2]
    thread.close()


def test_a_thread_that_cannot_start_is_started_by_the_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = BackgroundThread("test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                thread.submit(int)
    job = thread.submit(int)
    assert job is not None
    assert job.result(60) == 0
    thread.close()
