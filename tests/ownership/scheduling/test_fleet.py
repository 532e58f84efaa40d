"""The fleet's table of figures."""

from __future__ import annotations

import dataclasses

import pytest

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec.presets import PRESETS
from ownership.scheduling import Link, Role, StateFootprint, WorkerLoad
from ownership.scheduling.fleet import FleetView
from tests.ownership.scheduling.fleets import BYTE_A_TOKEN, KV, costs_of, fleet_of, worker


def test_workers_are_in_order_of_their_names() -> None:
    fleet = fleet_of(worker("b", WorkerLoad(queued_tokens=7)), worker("a"))
    assert fleet.names == ("a", "b")
    assert fleet.table().queued_tokens.tolist() == [0.0, 7.0]


def test_a_table_is_a_copy_of_the_present_figures() -> None:
    fleet = fleet_of(worker("a"), worker("b"))
    before = fleet.table()
    fleet.set_load("b", WorkerLoad(queued_tokens=5, accepting=False))
    assert before.queued_tokens.tolist() == [0.0, 0.0]
    after = fleet.table()
    assert (after.queued_tokens[1], after.accepting[1]) == (5.0, 0.0)
    fleet.update(worker("b", WorkerLoad(queued_tokens=6), costs_of(token_s=0.5)))
    assert fleet.table().queued_tokens[1] == 6.0
    assert fleet.table().machine.token_s.tolist() == pytest.approx([1e-3, 0.5])
    assert after.machine.token_s.tolist() == pytest.approx([1e-3, 1e-3])


def test_pools_by_role() -> None:
    fleet = fleet_of(worker("a", role=Role.PREFILL), worker("b"), worker("c"))
    assert (fleet.prefill_pool, fleet.decode_pool) == ((0,), (1, 2))
    only_prefill = fleet_of(worker("a", role=Role.PREFILL))
    assert only_prefill.decode_pool == (0,)


@pytest.mark.parametrize(
    ("workers", "links", "message"),
    [
        ([], None, "at least one worker"),
        (["a", "a"], None, "its own name"),
        (["a", "b"], {("a", "x"): Link()}, "no such worker"),
        (["a", "b"], {("a", "b"): Link(-1.0)}, "finite and at least 0"),
    ],
)
def test_an_impossible_fleet_is_refused(workers, links, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        FleetView(BYTE_A_TOKEN, [worker(name) for name in workers], links)


@pytest.mark.parametrize(
    ("change", "message"), [({"name": ""}, "needs a name"), ({"hbm_bytes": 0}, "hbm_bytes")]
)
def test_an_impossible_worker_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(worker("a"), **change)  # type: ignore[arg-type]


def test_a_footprint_counts_the_bytes_that_the_layout_stores() -> None:
    """DeepSeek-V4 Flash at a boundary past every window."""
    model = PRESETS["deepseek-v4-flash"]()
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    footprint = StateFootprint.of(layout)
    end = 64 * layout.chunk_tokens
    first = (end - layout.chunk_tokens, end)
    for state_type, per_token in footprint.token_bytes.items():
        expected = layout.artifact_bytes(state_type, *first)
        assert per_token * layout.chunk_tokens == pytest.approx(expected)
    for state_type, size in footprint.checkpoint_bytes.items():
        assert size == layout.artifact_bytes(state_type, *first)
    assert footprint.num_layers == len(model.stored_layers)


def test_a_footprint_has_sizes() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        StateFootprint({KV: -1.0}, {}, 1.0, 1)
    with pytest.raises(ValueError, match="a layer"):
        StateFootprint({KV: 1.0}, {}, 1.0, 0)
