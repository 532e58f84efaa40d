"""Step times by the figures of accelerators, and how far they are from published measurements."""

from __future__ import annotations

import pytest

from hetero_connector.spec.presets import PRESETS
from ownership.simulator.machine.costs import COMPUTE, HARDWARE, derived_costs, roofline_of
from ownership.simulator.machine.roofline import Roofline, RooflineTimes

TENTH = Roofline(
    launch_s=1.0, weights_s=10.0, used_share=0.1, token_s=0.5, exchange_s=0.0, pair_s=0.01,
    context_s=0.001,
)  # fmt: skip


def of(model: str, hardware: str, gpus: int) -> Roofline:
    spec = PRESETS[model](tp_size=gpus)
    return roofline_of(HARDWARE[hardware], gpus, spec, COMPUTE[model])


def times_of(model: str, hardware: str = "h200", gpus: int = 2) -> RooflineTimes:
    roofline, spec = of(model, hardware, gpus), PRESETS[model](tp_size=gpus)
    return RooflineTimes(derived_costs(HARDWARE[hardware], gpus, spec, roofline, 8_192), roofline)


def test_a_step_reads_the_weights_that_its_tokens_use() -> None:
    """One token a tenth, two 1 - 0.9^2. From about 16 on the operations take longer."""
    assert TENTH.products_s(1) == pytest.approx(1.0)
    assert TENTH.products_s(2) == pytest.approx(1.9)
    assert TENTH.products_s(100) == pytest.approx(50.0)


def test_the_larger_side_counts() -> None:
    """A chunk of 8,192 tokens hides reading the weights; a decode is nothing but that."""
    llama = of("llama-3.1-8b", "h200", 1)
    assert llama.products_s(8_192) == pytest.approx(8_192 * 16e9 / (0.5 * 989e12))
    assert llama.products_s(1) == pytest.approx(16e9 / (0.8 * 4.8e12))


def test_a_prefill_delays_decodes_by_what_it_adds_to_the_step() -> None:
    times, roofline = times_of("deepseek-v4-flash"), of("deepseek-v4-flash", "h200", 2)
    alone_s = times.decode_s(4, 4_000)
    together_s = alone_s + times.delay_s(500, 125_000.0, 4)
    expected_s = roofline.launch_s + roofline.products_s(504) + 125_000 * roofline.pair_s
    assert together_s == pytest.approx(expected_s + 4_000 * roofline.context_s)
    assert times.delay_s(500, 125_000.0, 64) < times.delay_s(500, 125_000.0, 1), "experts are read"


@pytest.mark.parametrize("model", COMPUTE)
def test_the_lines_that_policies_see_are_near(model: str) -> None:
    """Full chunks within a tenth; decodes, whose time is no line, within two fifths."""
    roofline = of(model, "h200", 16)
    compute, delays = roofline.lines(8_192)
    full_s = roofline.launch_s + roofline.products_s(8_192)
    assert compute.prompt_s(8_192, 0) - compute.attention_s * 8_192**2 / 2 == pytest.approx(
        full_s, rel=0.1
    )
    for decodes in (1, 4, 16, 64):
        step_s = roofline.launch_s + roofline.products_s(decodes)
        assert delays.decode_step_s(decodes, 0.0) == pytest.approx(step_s, rel=0.4)


@pytest.mark.parametrize(
    ("tokens", "published_s"), [(8_192, 0.2054), (16_384, 0.4263), (32_768, 0.983), (49_152, 1.695)]
)
def test_prefills_of_gpt_oss_are_as_published(tokens: int, published_s: float) -> None:
    """llm-d, guides/p2p-kv-cache-sharing, one H200: time to the first token of a recomputation."""
    times = times_of("gpt-oss-120b", gpus=1)
    assert times.alone_s(tokens, 0, 1) == pytest.approx(published_s, rel=0.1)


@pytest.mark.parametrize(
    ("model", "hardware", "gpus", "least", "most"),
    [("deepseek-v3", "h200", 8, 16_000, 32_000), ("deepseek-v3", "h20", 8, 12_000, 16_500)],
)
def test_prefill_rates_are_between_the_published_ones(
    model: str, hardware: str, gpus: int, least: float, most: float
) -> None:
    """Tokens per second of prompts of 4,096."""
    assert least < 4_096 / times_of(model, hardware, gpus).alone_s(4_096, 0, 1) < most


def test_a_decode_alone_is_near_the_published_one() -> None:
    """DeepSeek-V4-Flash on two GH200: 9.4 ms without speculative decoding."""
    assert times_of("deepseek-v4-flash").decode_s(1, 4_096) == pytest.approx(9.4e-3, rel=0.25)
