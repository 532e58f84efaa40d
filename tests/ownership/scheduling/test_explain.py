"""A decision is printed with every candidate."""

from __future__ import annotations

from ownership.scheduling import OwnerServe, Step, WorkerLoad, WorkerPrefix
from ownership.scheduling.admission import GatedPolicy
from ownership.scheduling.baselines import StaticPd
from ownership.scheduling.explain import explain
from tests.ownership.scheduling.fleets import FREE, fleet_of, worker

STEP = Step(1_000, {"a": WorkerPrefix(0, 900, 900)}, "s", "a", 900)
FLEET = fleet_of(worker("a", WorkerLoad(queued_tokens=1_000)), worker("b"))


def test_every_candidate_has_a_line_the_cheapest_first() -> None:
    lines = explain(OwnerServe(FREE).decide(STEP, FLEET)).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["*", "tail_recompute", "remote_prefill"]
    assert lines[2].split()[1:6] == ["state_migration", "b", "b", "a", "900"]
    assert lines[2].split()[6:] == ["0.0", "100.0", "90.0", *["0.0"] * 5, "190.0"]
    assert lines[-3:] == [
        "step: 1000 tokens",
        "choice: state_migration, decode at b, reading from a",
        "predicted time to first token: 190.0 ms",
    ]


def test_the_choice_is_shown_however_few_lines_there_are() -> None:
    text = explain(StaticPd(FREE).decide(STEP, FLEET), max_rows=1)
    assert "1 more candidates are not shown" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("*")] == [
        "remote_prefill"
    ]
    assert "decode at a, prefill at b" in text


def test_a_refusal_is_printed() -> None:
    policy = GatedPolicy(OwnerServe(FREE), 0.1)
    assert explain(policy.decide(STEP, FLEET)).splitlines()[-1] == (
        "refused: first token after 0.19 s, the objective is 0.1 s"
    )
