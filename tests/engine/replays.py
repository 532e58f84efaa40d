"""What a replay is in each model, and an engine's own hits to hold it against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

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
"""A logprob difference no rounding makes."""

PROMPT = prompt_tokens(1400, seed=21)


@dataclass(frozen=True)
class Case:
    """What a replay is in one model, in tokens."""

    name: str
    grid: int
    replayed: int
    """(window - 1) x window layers, on the grid."""

    def boundary(self, num_tokens: int = len(PROMPT)) -> int:
        """The last one at which a prompt of `num_tokens` can resume."""
        return (num_tokens - 1) // self.grid * self.grid

    @property
    def resume(self) -> int:
        """Where a replay of PROMPT begins."""
        return self.boundary() - self.replayed

    @property
    def tolerance(self) -> float:
        return 0.0 if self.name in BF16_MODELS else 1e-4

    def same(self, completion: Completion, reference: Completion) -> None:
        assert completion.tokens == reference.tokens[: len(completion.tokens)]
        assert error(completion, reference) <= self.tolerance

    def same_in_batch(self, completion: Completion, reference: Completion) -> None:
        """Of a bfloat16 model by its first token: the next ones share steps with other prompts,
        and on CPUs with AMX kernels for up to four rows round differently from those for more.
        """
        if self.name in BF16_MODELS:
            self.same(cut(completion, 1), reference)
            return
        assert completion.tokens == reference.tokens[: len(completion.tokens)]
        assert error(completion, reference) <= BESIDE_OTHERS


BESIDE_OTHERS = 1e-4 if torch.cpu._is_avx512_supported() else 3e-4
"""Of float32 models. vLLM's kernels for CPUs without AVX-512 round by the shape of a batch more
than those with it: the engine's own hits on these prompts, alone and beside each other, differ by
up to 5.8e-5 there, its cold answers in steps of 170, 300 or 512 tokens from its hits by up to
6.5e-5, and who shares which step differs from run to run. State that is wrong shows by 0.02."""

CASES = (
    Case("gemma3", grid=32, replayed=384),  # 63 x 6
    Case("gptoss", grid=32, replayed=256),  # 63 x 4
    Case("deepseek_v4", grid=256, replayed=768),  # 127 x 5
)


def own_hits(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[Completion]:
    with no_restores(llm):
        generate_batch(llm, prompts)
        return generate_batch(llm, prompts, max_tokens)


def error(completion: Completion, reference: Completion) -> float:
    """Largest logprob difference, over as many tokens as the shorter one has."""
    count = min(len(completion.tokens), len(reference.tokens))
    return delta(cut(completion, count), cut(reference, count))


def cut(completion: Completion, count: int) -> Completion:
    return replace(
        completion, tokens=completion.tokens[:count], logprobs=completion.logprobs[:count]
    )


def scheduler_of(llm: Any) -> Any:
    """vLLM's own."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def steps_of(llm: Any, num_tokens: int) -> Iterator[None]:
    """No engine step computes more tokens."""
    with patch.object(scheduler_of(llm), "max_num_scheduled_tokens", num_tokens):
        yield
