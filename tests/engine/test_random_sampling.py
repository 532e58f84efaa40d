"""Random sessions whose tokens are drawn, on the second model runner (see `test_soak`).

There a token depends on the seed and its position alone. The first runner cannot prefill a request
with a seed in several steps on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import engine
from tests.engine.soaking import SHORT, arguments, assert_answers
from tests.engine.test_soak import EVERYTHING, assert_hard_times, lives
from tests.engine.traffic import record

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_every_answer_is_the_engines_own(tmp_path: Path) -> None:
    model = "gemma3"  # rounding in bfloat16 changes tokens that are drawn
    with engine(model, **arguments(model)) as llm:
        traffic = record(llm, seed=SHORT, num_rounds=SHORT, sampled=True)
    answers, counts = lives(model, EVERYTHING | {"ssd_dir": str(tmp_path)}, [traffic.rounds])
    assert_hard_times(model, counts)
    pairs = [(a, r) for a, r in zip(answers, traffic.answers, strict=True) if a and r]
    same = sum(answer.tokens == reference.tokens for answer, reference in pairs)
    print(f"{same} of {len(pairs)} answers have the reference's tokens")
    assert same > len(pairs) / 2, "the seeds decide nothing"
    assert_answers(model, answers, traffic)
