"""A finished request's attention page becomes another's recurrent page in the step that copies it.

vLLM's second model runner copies the previous page's recurrent state into it before its first call
of a connector. Without the check that state would be sealed as attention state, and the restored
answer would be NaN.
"""

from __future__ import annotations

from typing import Any

import pytest

from hetero_connector.engine.messages import Save
from hetero_connector.engine.scheduler.early_saves import EarlySaves
from hetero_connector.spec import StateType
from tests.engine.harness import (
    delta,
    engine,
    forget,
    forget_local,
    generate,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.engine.single_steps import add, step

pytestmark = pytest.mark.engine

BLOCK = 640
"""Tokens of a block, and of the grid on which prompts are resumed."""
TAKEN_AT_ONCE = 18
"""With this number of KV blocks, the freed one is the next to be allocated."""


def test_a_page_that_becomes_recurrent_is_not_saved_as_attention_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finishing, behind_it = (prompt_tokens(BLOCK, seed=x) for x in (1, 5))
    growing = [prompt_tokens(BLOCK - 2, seed=x) for x in (2, 4)]
    question = finishing + prompt_tokens(30, seed=3)
    arguments: dict[str, Any] = {
        "max_num_batched_tokens": 1536,
        "prefix_cache_retention_interval": BLOCK,
        "max_model_len": 2 * BLOCK + 40,
        "num_gpu_blocks_override": TAKEN_AT_ONCE,
    }
    with engine("qwen3_next", {"dram_gib": 0.25}, **arguments) as llm:
        side = scheduler_side(llm)
        recurrent = {x.group for x in side.layout.model.page_groups[StateType.RECURRENT]}
        contested: set[int] = set()
        begin_save, finished, take = side.store.begin_save, side.on_finished, EarlySaves.take

        def no_room(chunk: Any, sizes: Any, *, is_again: bool) -> Any:
            return None if StateType.DENSE_KV in sizes else begin_save(chunk, sizes)

        def room_at_the_end(request: Any, block_ids: Any) -> Any:
            if request.all_token_ids[:BLOCK] == finishing:
                monkeypatch.setattr(side.store, "begin_save", begin_save)
            return finished(request, block_ids)

        def watched(early: EarlySaves, output: Any) -> list[Save]:
            tables = [x.block_ids for x in output.scheduled_new_reqs]
            tables += filter(None, output.scheduled_cached_reqs.new_block_ids)
            taken = {block for table in tables for group in recurrent for block in table[group]}
            for save in early._waiting:
                for blocks in save.copy.blocks.values():
                    contested.update(taken.intersection(blocks.ids))
            return take(early, output)

        monkeypatch.setattr(EarlySaves, "take", watched)
        monkeypatch.setattr(side, "on_finished", room_at_the_end)
        for prompt in growing:
            add(llm, prompt, max_tokens=12)
        step(llm, 2)
        add(llm, finishing, max_tokens=1)
        add(llm, behind_it, max_tokens=1)
        monkeypatch.setattr(side.store, "begin_save", no_room)
        step(llm, 14)
        assert contested, "no page went from attention to recurrent state: nothing was tried"

        for _ in range(2):  # the first stores recurrent state where none was on offer
            forget_local(llm)
            restored = generate(llm, question, max_tokens=4)
        assert restored.num_cached_tokens == BLOCK
        forget(llm)
        generate(llm, question)
        settle(llm)
        with no_restores(llm):
            own = generate(llm, question, max_tokens=4)
        assert own.num_cached_tokens == BLOCK
        assert delta(restored, own) == 0.0
