"""MLA state on the CPU is stored only if vLLM itself resumes from its pages."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from hetero_connector.engine.startup import start
from hetero_connector.spec import StateType
from tests.engine.harness import (
    delta,
    engine,
    flipped,
    forget_local,
    generate,
    leave_on_ssd_only,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
    wiped,
)

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1400, seed=91)
BOUNDARY = 1280
"""The last multiple of the AMX backend's 128-token blocks before the prompt's end."""
CLEAR = 0.02


def test_the_reference_backend_is_served_and_nothing_is_stored() -> None:
    with (
        patch.object(start.logger, "warning", wraps=start.logger.warning) as warning,
        engine("mla", {"dram_gib": 0.1}, attention_backend="CPU_MLA") as llm,
    ):
        one = generate(llm, PROMPT, max_tokens=4)
        two = generate(llm, PROMPT, max_tokens=4)
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        assert connector._scheduler is None
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 0)
    assert one.tokens == two.tokens
    logged = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert any("stores nothing for this model: vLLM's CPU_MLA" in line for line in logged)


if torch.cpu._is_amx_tile_supported():  # else vLLM has no other MLA backend for this CPU

    @pytest.fixture(scope="module", name="llm")
    def _llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
        extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_gib": 0.2}
        with engine("mla-bf16", extra, max_num_batched_tokens=512) as llm:
            yield llm

    @pytest.mark.parametrize("tier", ["dram", "ssd"])
    def test_with_amx_a_restore_is_exact(llm: object, tier: str) -> None:
        generate(llm, PROMPT)
        settle(llm)
        forget_local(llm)
        with no_restores(llm):
            generate(llm, PROMPT)
            reference = generate(llm, PROMPT, max_tokens=64)
        if tier == "ssd":
            leave_on_ssd_only(llm)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=64)
        assert reference.num_cached_tokens == restored.num_cached_tokens == BOUNDARY
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) == 0

    def test_power_with_amx(llm: object) -> None:
        generate(llm, PROMPT)
        settle(llm)
        forget_local(llm)
        right = generate(llm, PROMPT)
        assert scheduler_side(llm).layout.model.state_types == (StateType.MLA_LATENT,)
        assert delta(right, generate(llm, flipped(PROMPT, 3))) > CLEAR
        forget_local(llm)
        with wiped(llm, StateType.MLA_LATENT):
            wrong = generate(llm, PROMPT)
        assert wrong.num_cached_tokens == right.num_cached_tokens == BOUNDARY
        assert delta(right, wrong) > CLEAR
