"""vLLM's engine core ends after its parent was killed with -9; other processes do not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hetero_connector.connector import HeteroConnector
from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.messages import StepMetadata
from hetero_connector.engine.scheduler import admissions, restorer, scheduler_side
from hetero_connector.engine.startup.parent_watch import watch_parent
from hetero_connector.store import artifact_store
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, scheduled
from tests.engine.stepped import Engine, tokens
from tests.interleaving import try_every_switch

_PARENT = """
import multiprocessing, os, signal, sys, threading
from hetero_connector.engine.startup.parent_watch import watch_parent

def child(hangs):
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), ended.set()))
    released = threading.Event()
    grace_s = 0.2 if hangs else 60.0
    watched = watch_parent(lambda: (print("released", flush=True), released.set()), grace_s)
    print("watched" if watched else "not watched", flush=True)
    if watched:
        ended.wait(30)
        if hangs:
            released.wait(30)

if __name__ == "__main__":
    name, hangs = sys.argv[1], sys.argv[2] == "hangs"
    context = multiprocessing.get_context(sys.argv[3])
    process = context.Process(target=child, args=(hangs,), name=name)
    process.start()
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def lines_of(script: Path, name: str, how: str, method: str) -> list[str]:
    """Return the lines that a child prints at start and after its parent was killed."""
    with subprocess.Popen(
        [sys.executable, str(script), name, how, method],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        first = parent.stdout.readline()
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait(30) == -signal.SIGKILL
        return [first.strip(), *parent.stdout.read().split("\n")[:-1]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "parent.py"
    path.write_text(_PARENT)
    return path


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1"])
def test_an_engine_core_ends_after_its_parent(script: Path, name: str, method: str) -> None:
    assert lines_of(script, name, "ends", method) == ["watched", "asked to end"]


def test_an_engine_core_that_does_not_end_releases_its_cache(script: Path) -> None:
    expected = ["watched", "asked to end", "released"]
    assert lines_of(script, "EngineCore", "hangs", "spawn") == expected


def test_another_process_lives_on_without_its_parent(script: Path) -> None:
    """An engine inside the user's own process does not end it."""
    assert lines_of(script, "worker-1", "ends", "spawn") == ["not watched"]


def test_a_process_without_a_parent_is_not_watched() -> None:
    assert multiprocessing.parent_process() is None
    assert watch_parent(lambda: None) is None
    assert "heterocache-parent-watch" not in {thread.name for thread in threading.enumerate()}


def connector_of(engine: Engine) -> HeteroConnector:
    connector = HeteroConnector.__new__(HeteroConnector)
    connector._scheduler, connector._worker = engine.side, None
    connector._closing, connector._errors = threading.Lock(), HookErrors(engine.recorder)
    connector._role = KVConnectorRole.WORKER  # no geometry was left for workers to find
    return connector


def schedule(
    connector: HeteroConnector, engine: Engine, request: FakeRequest, most_tokens: int = 192
) -> tuple[int, StepMetadata]:
    """Call the hooks of one step as vLLM does; return the tokens that it counts as restored."""
    tokens, _ = connector.get_num_new_matched_tokens(request, 0)  # type: ignore[arg-type]
    assert tokens is not None
    tokens = min(tokens, most_tokens)
    engine.grow_table(request)
    connector.update_state_after_alloc(request, Mock(), tokens)  # type: ignore[arg-type]
    request.num_computed_tokens = tokens
    output = scheduled(**{request.request_id: 200 - tokens})
    meta = connector.build_connector_meta(output)  # type: ignore[arg-type]
    assert isinstance(meta, StepMetadata)
    return tokens, meta


@pytest.mark.parametrize("most_tokens", [128, 192])
def test_an_engine_released_at_any_moment_loads_what_it_has_promised(most_tokens: int) -> None:
    promised: set[int] = set()
    engines: list[Engine] = []

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        engine = Engine(HYBRID)
        engines.append(engine)
        engine.run(FakeRequest("a", tokens(200)))
        connector, request = connector_of(engine), FakeRequest("b", tokens(200))

        def first() -> None:
            count, meta = schedule(connector, engine, request, most_tokens)
            promised.add(count)
            assert [x.request_id for x in [*meta.loads, *meta.lost]] == ["b"] * bool(count)

        return first, connector._release

    modules = (scheduler_side, restorer, admissions, artifact_store)
    assert try_every_switch(prepare, *modules, every=53) > 5
    assert promised == {0, most_tokens}
    engines[-1].side.close()


def test_once_released_nothing_is_restored_or_saved() -> None:
    engine = Engine(DENSE)
    engine.run(FakeRequest("a", tokens(200)))
    connector, request = connector_of(engine), FakeRequest("b", tokens(200))
    connector._release()
    connector.on_new_request(request)  # type: ignore[arg-type]
    count, meta = schedule(connector, engine, request)
    assert (count, meta.loads, meta.saves, meta.lost) == (0, [], [], [])
    engine.report(meta)
    request.num_computed_tokens = 200
    ids = engine.tables.ids["b"]
    assert connector.request_finished_all_groups(request, ids) == (False, None)  # type: ignore[arg-type]
    assert not connector.has_pending_push_work()
    assert connector.reset_cache() is False
    connector.on_weights_changed("2")
    connector._release()
    connector.shutdown()
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
