"""A benchmark publishes only what a run with its default options has measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    checkpoint_policies,
    device_path,
    faults,
    hindsight,
    ledger,
    measure,
    router,
    router_corpora,
    router_identity,
    router_overload,
    router_sessions,
)

_AS_GIVEN = SimpleNamespace(run=lambda result: result)
"""In the place of uvloop: what is measured is no coroutine here."""


def of_faults(patch: Callable[..., None]) -> None:
    patch(faults, "open_big_tier", lambda _: faults.BigTier(1, 1.0, 1, 1.0, 1.0))
    patch(faults, "evict_under_restores", lambda: faults.Evictions(1.0, 1.0, 1.0))
    counts = dict.fromkeys(("rounds", "wrong_answers", "hangs", "engine_deaths", "stuck"), 0)
    patch(faults, "run_campaign", lambda *_: SimpleNamespace(**counts, findings=[]))


def of_router(patch: Callable[..., None]) -> None:
    patch(router, "StubFleet", lambda _: nullcontext(SimpleNamespace(urls=[])))
    for name in ("measure", "measure_placed"):
        patch(router, name, lambda *_: {})
    patch(router, "decision_us", lambda: 1.0)
    blocks = [router_sessions.Block(0.0, wall_s=1.0)]
    patch(router_sessions, "measure", lambda *_, **__: ({}, blocks))


def of_others(patch: Callable[..., None]) -> None:
    patch(device_path, "measure", lambda *_, **__: device_path.Restore(1.0, 1, 1.0, 0))
    patch(ledger, "measure", lambda *_: {})
    patch(checkpoint_policies, "replay", lambda *_: [])
    patch(hindsight, "read", lambda *_, **__: None)
    patch(hindsight, "all_measured", lambda *_: [])
    patch(hindsight, "gc", SimpleNamespace(freeze=lambda: None))
    patch(router_corpora, "measure", lambda _: ([], {}))
    for module in (router_identity, router_overload):
        patch(module, "measure", lambda *_: {})


@pytest.mark.parametrize(
    ("module", "given", "is_published"),
    [
        (router_overload, "--json", True),
        (router_overload, "--seconds 5", False),
        (router_corpora, "", True),
        (router_corpora, "--requests 2", False),
        (router_identity, "", True),
        (router_identity, "--tokens 5000", False),
        (faults, "", True),
        (faults, "--rounds 3", False),
        (faults, "--rows 1000", False),
        (device_path, "", True),
        (device_path, "--quick", False),
        (router, "", True),
        (router, "--turns 1", False),
        (router, "--rates 1", False),
        (ledger, "--mooncake a --sessions b", True),
        (ledger, "--mooncake a", False),
        (hindsight, "--mooncake a --sessions b", True),
        (hindsight, "--mooncake a --sessions b --quick", False),
        (hindsight, "--mooncake a", False),
        (hindsight, "--sessions b", False),
        (hindsight, "", False),
        (checkpoint_policies, "--out", True),
        (checkpoint_policies, "", False),
    ],
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, ModuleType) else None,
)
def test_only_a_run_with_the_default_options_is_published(
    module: Any, given: str, is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: dict[str, Any] = {}
    for make in (of_faults, of_router, of_others):
        make(monkeypatch.setattr)
    monkeypatch.setattr(module, "uvloop", _AS_GIVEN, raising=False)
    monkeypatch.setattr(module, "publish", lambda *_, **kwargs: published.update(kwargs))
    monkeypatch.setattr(sys, "argv", [module.__name__, *given.split()])
    module.main()
    assert published["write"] is is_published


def test_nothing_is_written_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setenv(measure.WRITES_NOTHING, "1")
    measure.publish("made_up", "", {}, {}, as_json=False)
    assert not (tmp_path / "results").exists()
    monkeypatch.delenv(measure.WRITES_NOTHING)
    measure.publish("made_up", "", {}, {}, as_json=False, machine="Elsewhere, 2 cores")
    [result] = (tmp_path / "results").glob("*.json")
    assert '"machine": "Elsewhere, 2 cores"' in result.read_text()
