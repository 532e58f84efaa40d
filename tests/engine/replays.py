"""The replays of each model, and the engine's own hits as the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.engine.harness import (
    BF16_MODELS,
    Completion,
    delta,
    generate_batch,
    no_restores,
    prompt_tokens,
)

CLEAR = 0.02
"""A logprob difference that rounding cannot cause."""

PROMPT = prompt_tokens(1400, seed=21)


@dataclass(frozen=True)
class Case:
    """The replay of one model, in tokens."""

    name: str
    grid: int
    replayed: int
    """(window - 1) x window layers, on the grid."""

    def boundary(self, num_tokens: int = len(PROMPT)) -> int:
        """The last boundary at which a prompt of `num_tokens` can resume."""
        return (num_tokens - 1) // self.grid * self.grid

    @property
    def resume(self) -> int:
        """The token at which a replay of PROMPT begins."""
        return self.boundary() - self.replayed

    @property
    def tolerance(self) -> float:
        return 0.0 if self.name in BF16_MODELS else 1e-4

    def same(self, completion: Completion, reference: Completion) -> None:
        assert completion.tokens == reference.tokens[: len(completion.tokens)]
        assert error(completion, reference) <= self.tolerance

    def same_in_batch(self, completion: Completion, reference: Completion) -> None:
        """Compare answers that share steps with other prompts.

        bfloat16 models are compared by the first token only: on CPUs with AMX, kernels for up to
        four rows round differently from those for more.
        """
        if self.name in BF16_MODELS:
            self.same(cut(completion, 1), reference)
            return
        assert completion.tokens == reference.tokens[: len(completion.tokens)]
        assert error(completion, reference) <= IN_BATCH


IN_BATCH = 1e-4 if torch.cpu._is_avx512_supported() else 3e-4
"""Tolerance for float32 models in a batch. Without AVX-512 vLLM's CPU kernels round more by the
shape of a batch: there the engine's own hits on these prompts, alone and in a batch, differ by up
to 5.8e-5, its cold answers in steps of 170, 300 or 512 tokens differ from its hits by up to 6.5e-5,
and the requests that share a step differ from run to run. Wrong state shows by 0.02."""

CASES = (
    Case("gemma3", grid=32, replayed=384),  # 63 x 6
    Case("gptoss", grid=32, replayed=256),  # 63 x 4
    Case("deepseek_v4", grid=256, replayed=768),  # 127 x 5
)


def params(*cases: Case) -> list[Any]:
    """Return the cases as pytest's parameters. gpt-oss is slow: its windows are those of Gemma."""
    return [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name == "gptoss" else ())
        for case in cases
    ]


def own_hits(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[Completion]:
    with no_restores(llm):
        generate_batch(llm, prompts)
        return generate_batch(llm, prompts, max_tokens)


def error(completion: Completion, reference: Completion) -> float:
    """Return the largest logprob difference, over the tokens of the shorter answer."""
    count = min(len(completion.tokens), len(reference.tokens))
    return delta(cut(completion, count), cut(reference, count))


def cut(completion: Completion, count: int) -> Completion:
    return replace(
        completion, tokens=completion.tokens[:count], logprobs=completion.logprobs[:count]
    )


def scheduler_of(llm: Any) -> Any:
    """Return vLLM's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def steps_of(llm: Any, num_tokens: int) -> Iterator[None]:
    """Limit the tokens that an engine step computes."""
    with patch.object(scheduler_of(llm), "max_num_scheduled_tokens", num_tokens):
        yield
