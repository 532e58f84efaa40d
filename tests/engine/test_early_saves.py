"""The next step copies the saves of finished requests unless vLLM overwrites their pages first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.engine.messages import Blocks, PageCopy, Save
from hetero_connector.engine.scheduler.early_saves import EarlySaves
from hetero_connector.metrics import Recorder
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from tests.engine.fakes import layer, scheduled

KV = StateType.DENSE_KV
RECURRENT = LayerSpec(
    layer="mamba", group=1, state_type=StateType.RECURRENT, tokens_per_state=1, block_tokens=16,
    page_bytes=256, page_stride_bytes=256, dtype="uint8", restore_rule=RestoreRule.AT_BOUNDARY,
)  # fmt: skip
MODEL = ModelSpec((layer("full", 0), RECURRENT), alignment=16)
FREED = [3, 4]
"""Return a save of these blocks."""


class Abandoned:
    """A saver that counts abandoned saves."""

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self.abandon = self.saves.append


def output(*, new: Any = (), more: Any = (), **written: Any) -> Any:
    """Return a step that gives requests these blocks, by KV cache group."""
    result = scheduled()
    result.scheduled_new_reqs = [SimpleNamespace(block_ids=ids) for ids in new]
    result.scheduled_cached_reqs.new_block_ids = list(more)
    vars(result).update(written)
    return result


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (output(), True),
        (output(new_block_ids_to_zero=[4]), False),
        (output(kv_cache_block_copies=[SimpleNamespace(dst_block_id=3)]), False),
        (output(kv_cache_block_copies=[SimpleNamespace(dst_block_id=9)]), True),
        (output(new=[([3, 4, 5], [9])]), True),
        (output(new=[([5], [8, 4])]), False),
        (output(more=[None, ([3], [9])]), True),
        (output(more=[None, ([5], [3])]), False),
    ],
    ids=[
        "nothing", "zeroed", "copied over", "another is copied over",
        "a new request attends", "a new request recurs", "attends on", "recurs on",
    ],
)  # fmt: skip
def test_a_save_is_abandoned_if_vllm_writes_its_pages_before_the_hook(
    step: Any, kept: bool
) -> None:
    """The forward runs after the copy; vLLM's copies to recurrent pages run before it."""
    saver = Abandoned()
    early = EarlySaves(saver, Recorder(), MODEL)  # type: ignore[arg-type]
    save = Save([1], PageCopy([], {(KV, 0): Blocks(0, FREED)}))
    early.add([save])
    assert early.take(step) == [save] * kept
    assert saver.saves == [save] * (not kept)
    assert not early
