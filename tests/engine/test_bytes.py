"""Exactly the useful bytes are stored: they are computed here from the model's shape."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.spec import StateType
from tests.engine.harness import (
    HYBRID_MODELS,
    engine,
    forget_local,
    generate,
    leave_on_ssd_only,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)

pytestmark = pytest.mark.engine

FP32, BF16 = 4, 2
K_AND_V = 2
V4_ENTRY = 448 + 2 * 64 + 8
"""448 fp8 values, 64 bf16 values with RoPE, 7 scales and one byte of padding."""
V4_INDEX_ENTRY = 128 + 4
"""128 fp8 values and a float32 scale."""


def csa_rows(head_dim: int) -> int:
    """The 4 tokens before a boundary: CSA's compressor keeps values and gates, twice each."""
    return 4 * (2 * 2 * head_dim * FP32)


PER_TOKEN: dict[str, dict[StateType, float]] = {
    "dense": {StateType.DENSE_KV: 4 * K_AND_V * 2 * 32 * FP32},
    "gemma3": {StateType.DENSE_KV: 3 * K_AND_V * 2 * 32 * FP32},
    "gptoss": {StateType.DENSE_KV: 4 * K_AND_V * 2 * 64 * FP32},
    "deepseek_v4": {
        StateType.COMPRESSED_CSA_MAIN: 2 * V4_ENTRY / 4,
        StateType.COMPRESSED_CSA_INDEX: 2 * V4_INDEX_ENTRY / 4,
        StateType.COMPRESSED_HCA: 2 * V4_ENTRY / 128,
    },
    "qwen3_next": {StateType.DENSE_KV: 1 * K_AND_V * 2 * 64 * BF16},
}
"""Useful bytes of a token's prefix-proportional state: layers x ..."""

PER_CHECKPOINT: dict[str, dict[StateType, int]] = {
    "dense": {},
    # A window of 64 needs the 63 tokens before the boundary: two blocks of 32.
    "gemma3": {StateType.WINDOW_SWA: 6 * 64 * K_AND_V * 2 * 32 * FP32},
    "gptoss": {StateType.WINDOW_SWA: 4 * 64 * K_AND_V * 2 * 64 * FP32},
    "deepseek_v4": {
        # 127 tokens: two blocks of 64.
        StateType.WINDOW_SWA: 5 * 128 * V4_ENTRY,
        # Nothing of the HCA compressors: at an aligned boundary their block is complete.
        StateType.TAIL_STATE: 2 * (csa_rows(512) + csa_rows(128)),
    },
    "qwen3_next": {
        # 3 rows of the convolution's 2 x 2 x 128 + 4 x 128 channels, and 4 heads of state.
        StateType.RECURRENT: 3 * (3 * (2 * 2 * 128 + 4 * 128) * BF16 + 4 * 128 * 128 * FP32),
    },
}
"""Useful bytes of the boundary states at one boundary."""


@pytest.fixture(scope="module", params=("dense", *HYBRID_MODELS))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(shared_llm: Any) -> Any:
    return shared_llm


def stored_bytes(llm: Any, tier: Tier) -> dict[StateType, int]:
    """Return the stored bytes as /metrics shows them."""
    return {kind: size for (t, kind), size in _accounts(llm).items() if t is tier and size}


def _accounts(llm: Any) -> dict[tuple[Tier, StateType], int]:
    return dict(scheduler_side(llm).store.catalog.tiers._bytes)


def test_every_artifact_has_its_useful_bytes_and_no_more(llm: Any, model: str) -> None:
    generate(llm, prompt_tokens(1400, seed=31), max_tokens=60)
    settle(llm)
    artifacts = sealed(llm)
    assert {a.state_type for a in artifacts} == {*PER_TOKEN[model], *PER_CHECKPOINT[model]}
    for artifact in artifacts:
        chunk, kind = artifact.node.chunk, artifact.state_type
        expected = PER_CHECKPOINT[model].get(kind)
        if expected is None:
            expected = PER_TOKEN[model][kind] * (chunk.end - chunk.start)
        assert artifact.size_bytes == expected, (kind, chunk)


def test_a_prompt_stores_its_tokens_and_its_checkpoints(llm: Any, model: str) -> None:
    generate(llm, prompt_tokens(1300, seed=32))
    settle(llm)
    layout = scheduler_side(llm).layout
    last = 1300 // layout.model.alignment * layout.model.alignment
    expected = {kind: size * last for kind, size in PER_TOKEN[model].items()}
    for kind, size in PER_CHECKPOINT[model].items():
        expected[kind] = size * -(-last // layout.chunk_tokens)
    assert stored_bytes(llm, Tier.DRAM) == expected
    # The SSD holds the same bytes; what a restore moves is the last checkpoint alone.
    leave_on_ssd_only(llm)
    assert stored_bytes(llm, Tier.SSD) == expected
    assert stored_bytes(llm, Tier.DRAM) == {}


def test_a_restore_moves_the_prefix_and_one_checkpoint(llm: Any, model: str) -> None:
    prompt = prompt_tokens(1300, seed=33)
    generate(llm, prompt)
    forget_local(llm)
    side = scheduler_side(llm)
    moved: dict[StateType, float] = {}
    add = side._recorder.add

    def count(name: str, value: float = 1.0, **labels: str) -> None:
        if name == "heterocache_restored_bytes":
            kind = StateType(labels["state_type"])
            moved[kind] = moved.get(kind, 0) + value
        add(name, value, **labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side._recorder, "add", count)
        boundary = generate(llm, prompt).num_cached_tokens
    assert boundary == 1299 // side.layout.model.alignment * side.layout.model.alignment
    assert (
        moved
        == {k: size * boundary for k, size in PER_TOKEN[model].items()} | (PER_CHECKPOINT[model])
    )


@pytest.mark.slow
def test_by_default_recurrent_state_is_stored_at_a_prompts_last_boundary_only() -> None:
    with engine("qwen3_next", {"dram_gib": 0.1}) as llm:
        generate(llm, prompt_tokens(1300, seed=32))
        settle(llm)
        stored = stored_bytes(llm, Tier.DRAM)
    assert stored[StateType.RECURRENT] == PER_CHECKPOINT["qwen3_next"][StateType.RECURRENT]
