"""Masks change the slots of the protected blocks and no others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.engine.worker.slot_masks import protect
from hetero_connector.spec import StateType
from tests.engine.fakes import layer

FULL = [layer("full.0", 0), layer("full.1", 0)]
SWA = layer("swa", 1)
BLOCK = 16


@given(
    st.lists(st.integers(-1, 40 * BLOCK - 1)),
    st.lists(st.integers(0, 39), unique=True, min_size=1),
)
def test_only_the_protected_blocks_are_masked(slots: list[int], blocks: list[int]) -> None:
    mapping = torch.tensor(slots, dtype=torch.int64)
    protect(FULL, {0: blocks}, {"full.0": mapping, "full.1": mapping}, None)
    expected = [-1 if slot // BLOCK in blocks else slot for slot in slots]
    assert mapping.tolist() == expected


def test_other_groups_are_still_written() -> None:
    full, swa = (torch.arange(64) for _ in range(2))
    protect([*FULL, SWA], {0: [1]}, {"full.0": full, "full.1": full, "swa": swa}, None)
    assert full.tolist() == [*range(16), *[-1] * 16, *range(32, 64)]
    assert swa.tolist() == list(range(64))


def test_the_attentions_own_slot_mapping_is_masked_too() -> None:
    raw, own = torch.arange(32), torch.arange(32, dtype=torch.int32)
    attention = {"full.0": SimpleNamespace(slot_mapping=own), "full.1": SimpleNamespace()}
    protect(FULL, {0: [0]}, {"full.0": raw, "full.1": raw}, attention)
    assert raw.tolist() == own.tolist() == [*[-1] * 16, *range(16, 32)]


def test_a_layer_that_compresses_has_slots_for_its_states() -> None:
    csa = replace(layer("csa", 0, StateType.COMPRESSED_CSA_MAIN), tokens_per_state=4)
    raw = torch.arange(48)
    states = torch.tensor([-1, -1, -1, 3, -1, 4, 7, 8])
    protect([csa], {0: [1]}, {"csa": raw}, {"csa": SimpleNamespace(slot_mapping=states)})
    assert raw.tolist() == [*range(16), *[-1] * 16, *range(32, 48)]
    assert states.tolist() == [-1, -1, -1, 3, -1, -1, -1, 8]


def test_in_a_full_graph_the_captured_buffers_are_masked_through_the_metadata() -> None:
    """The runner gives no mappings then, and the graph reads the buffers it was captured with.

    They are longer than the step: what pads it is masked already.
    """
    csa = replace(layer("csa", 0, StateType.COMPRESSED_CSA_MAIN), tokens_per_state=4)
    tokens, states = (torch.full((48,), -1) for _ in range(2))
    captured_tokens, captured_states = tokens[:40], states[:40]
    tokens[:32] = torch.arange(32)
    states[:8] = torch.arange(8)
    metadata = {
        "full.0": SimpleNamespace(slot_mapping=tokens[:32]),
        "full.1": SimpleNamespace(slot_mapping=tokens[:32]),
        "csa": SimpleNamespace(slot_mapping=states[:8]),
    }
    protect([*FULL, csa], {0: [1]}, {}, metadata)
    assert captured_tokens.tolist() == [*range(16), *[-1] * 24]
    assert captured_states.tolist() == [*range(4), *[-1] * 36]


def test_a_layer_without_a_mapping_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"full\.1.*no slot mapping"):
        protect(FULL, {0: [0]}, {"full.0": torch.arange(32)}, {})
