"""The class that vLLM loads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.v1.outputs import KVConnectorOutput

from hetero_connector.connector import HeteroConnector
from tests.engine.fakes import FakeRequest
from tests.engine.stepped import tokens
from tests.engine.test_chain_root import hear
from tests.engine.test_hook_errors import Both


@pytest.fixture
def both() -> Iterator[Both]:
    both = Both.make()
    yield both
    both.close()


@pytest.mark.parametrize("layerwise", [{}, {"layerwise": "on"}, {"layerwise": "off"}])
def test_full_cuda_graphs_stay_whatever_this_machine_has(layerwise: dict[str, str]) -> None:
    """vLLM's API server calls this on a machine without the engine's disk and memory."""
    elsewhere = {"ssd_dir": "/proc/no/disk/here", "dram_gib": 1e9, **layerwise}
    assert not HeteroConnector.requires_piecewise_for_cudagraph(elsewhere)


def in_multi_connector(*children: Any) -> MultiConnector:
    """Return vLLM's MultiConnector with these children, which its constructor would make."""
    multi = object.__new__(MultiConnector)
    multi._connectors = list(children)
    multi._all_support_hma = True
    multi._extra_async_saves, multi._requests_to_connector = {}, {}
    return multi


def test_in_a_multi_connector_another_connector_hands_a_prompt_off(both: Both) -> None:
    """vLLM ends the engine if two connectors answer with the same keys."""
    answer = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e"}
    nixl = SimpleNamespace(request_finished_all_groups=lambda *_: (True, dict(answer)))
    asked = {"do_remote_decode": True, "heterocache": {"report": True}}
    request: Any = FakeRequest("a", tokens(100), kv_transfer_params=asked)
    for children in ((nixl, both.scheduler), (both.scheduler, nixl)):
        delayed, answered = in_multi_connector(*children).request_finished_all_groups(
            request, ([],)
        )
        assert answered is not None
        assert answered.pop("heterocache")["report"]["request_id"] == "a"
        assert (delayed, answered) == (True, answer)


def test_in_a_multi_connector_errors_of_workers_are_counted(both: Both) -> None:
    """vLLM has the statistics of each of its connectors by the name of its class."""
    both.worker._errors.count("start_load_kv", RuntimeError("boom"))
    stats = in_multi_connector(both.worker).get_kv_connector_stats()
    assert isinstance(stats, MultiKVConnectorStats)
    in_multi_connector(both.scheduler).update_connector_output(
        KVConnectorOutput(kv_connector_stats=stats)
    )
    counted = both.scheduler._recorder.sums(["heterocache_hook_errors"])
    assert counted == {"heterocache_hook_errors{hook=start_load_kv}": 1.0}


def test_a_gauge_says_if_the_fleet_finds_what_is_stored() -> None:
    both = Both.make(directory="redis://redis:6379")

    def gauge() -> float | None:
        return both.scheduler._recorder.gauge("heterocache_shared")

    try:
        assert gauge() == 1.0
        both.scheduler.reset_cache()
        assert gauge() == 0.0, "an idle engine makes a step to report it"
        assert both.scheduler._recorder.has_news()
        both.scheduler.get_kv_connector_stats()
        assert not both.scheduler._recorder.has_news()
        hear(both.engine, 7)
        both.step()
        both.scheduler.get_kv_connector_stats()
        assert gauge() == 1.0
        both.scheduler.on_weights_changed(None)
        assert gauge() == 0.0
    finally:
        both.close()


def test_an_engine_without_a_directory_has_no_gauge_of_sharing(both: Both) -> None:
    both.scheduler.reset_cache()
    both.scheduler.get_kv_connector_stats()
    assert both.scheduler._recorder.gauge("heterocache_shared") is None
