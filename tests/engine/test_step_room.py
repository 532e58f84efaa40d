"""A request with recurrent state is loaded in the step that computes it only if blocks are left.

The blocks are given out by vLLM's own `KVCacheManager`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import RequestStatus

from hetero_connector.engine.scheduler.step_room import StepRoom
from hetero_connector.spec import ModelSpec, StateType
from tests.engine.fakes import DENSE, FakeRequest, layer

BLOCK = 16
RESTORED = 4 * BLOCK
PROMPT = RESTORED + 5
NUM_RECURRENT = 3
ADMITTED = 5 + 2 * NUM_RECURRENT
"""The blocks of the request below: five of attention; restored states and running ones."""
MODEL = ModelSpec(
    (*DENSE.layers, *(layer(f"r{i}", i, StateType.RECURRENT) for i in range(1, NUM_RECURRENT + 1))),
    alignment=BLOCK,
)


def manager_of(free_blocks: int, num_speculative_blocks: int = 0) -> KVCacheManager:
    """Return vLLM's manager for one attention and three recurrent groups, with so many blocks."""
    groups = [
        KVCacheGroupSpec(
            ["full"],
            FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32),
        ),
        *(
            KVCacheGroupSpec(
                [f"r{i}"],
                MambaSpec(
                    block_size=BLOCK,
                    shapes=((4, 4),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align",
                    num_speculative_blocks=num_speculative_blocks,
                ),
            )
            for i in range(NUM_RECURRENT)
        ),
    ]
    return KVCacheManager(KVCacheConfig(free_blocks + 1, [], groups), 1024, BLOCK, BLOCK)


def admit(manager: KVCacheManager, *, between_steps: bool) -> bool:
    """Let vLLM allocate a request of which `RESTORED` tokens are loaded; False if it refuses."""
    request: Any = FakeRequest("a", list(range(PROMPT)))
    request.status = RequestStatus.WAITING
    request.num_in_flight_tokens = request.shared_prefix_boundary = 0
    blocks = manager.allocate_slots(
        request,
        0 if between_steps else PROMPT - RESTORED,
        num_external_computed_tokens=RESTORED,
        delay_cache_blocks=between_steps,
    )
    return blocks is not None


def room_of(manager: KVCacheManager) -> bool:
    room = StepRoom(MODEL)
    room.bind(manager)
    return room.suffices(PROMPT)


def test_vllm_counts_a_block_too_few() -> None:
    """The day this fails, `StepRoom` can go."""
    with pytest.raises(ValueError, match="free blocks"):
        admit(manager_of(ADMITTED - 1), between_steps=False)


@pytest.mark.parametrize("drafts", [0, 8])
def test_with_room_no_admission_fails(drafts: int) -> None:
    roomy = 0
    for free in range(1, 60):
        if room_of(manager_of(free, drafts)):
            assert admit(manager_of(free, drafts), between_steps=False)
            roomy += 1
        else:
            admit(manager_of(free, drafts), between_steps=True)  # it raises nothing
    assert roomy > 20, "an engine with free blocks loads in the step"


def test_other_models_need_no_room() -> None:
    room = StepRoom(DENSE)
    room.bind(manager_of(1))
    assert room.suffices(10**6)
