"""The next engine starts with the costs that this one learned, whatever the file has in it."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.scheduler.learned import LearnedKeeper, read_learned, recall
from hetero_connector.planner.checkpoints import Adaptive, Boundary, CheckpointSizes, Reuse
from hetero_connector.planner.compute_model import ComputeRegression, StepMix
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.planner.sessions import ThinkTimes
from hetero_connector.spec import StateType
from hetero_connector.tools import engines
from tests.engine.harness import engine, forget_local, generate, prompt_tokens, scheduler_side
from tests.waiting import until

KV = StateType.DENSE_KV
SUBJECT = ProfileSubject("Tiny", "c0ffee", "bfloat16", "", "auto", 1, "a processor, 2 cores")
SIZES = CheckpointSizes(256, 1 << 20, 1 << 22)


def learned(scale: float = 1.0) -> CostProfile:
    costs = CostModel(ComputeRegression(), LoadModel([KV]))
    for tokens in (1, 100, 2000) * 10:
        costs.compute.observe(tokens, tokens, scale * (1e-3 + 2e-5 * tokens))
        costs.load.observe(Tier.SSD, {KV: tokens * 10_000}, scale * (2e-3 + tokens * 1e-5))
        costs.interference.observe(StepMix(tokens, tokens**2, 3, 3000), 2e-3 + tokens * 3e-5)
    times, policy = ThinkTimes(), Adaptive(SIZES)
    for turn in range(6):
        times.on_turn_start("a", 20.0 * turn)
        times.on_turn_end("a", 20.0 * turn + 1.0, 15.0 if turn % 2 else None)
        policy.observe(Reuse(matched=10 * turn, kept=3, local=0, new=7))
    profile = CostProfile.of(costs, "models/tiny", SUBJECT)
    return replace(profile, pace=times.pace, reuse=policy.past)


LEARNED = learned()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learned.json"


def keep(path: Path, profile: CostProfile | None, **options: Any) -> None:
    answers = iter([None])
    LearnedKeeper(path, lambda: next(answers, profile), **options).close()


def test_what_is_kept_is_read_as_it_was_by_this_user_alone(path: Path) -> None:
    keep(path, LEARNED, now=lambda: 1.7e9)
    assert read_learned(path, SUBJECT) == replace(LEARNED, learned_until=1.7e9)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_it_is_written_while_the_engine_runs_once_for_each_change(path: Path) -> None:
    asked, written = [], iter(range(100, 200))

    def ask() -> CostProfile | None:
        asked.append(None)
        return LEARNED if len(asked) > 1 else None

    keeper = LearnedKeeper(path, ask, interval_s=1e-3, now=lambda: float(next(written)))
    until(lambda: len(asked) > 5)
    found = read_learned(path, SUBJECT)
    keeper.close()
    assert found == read_learned(path, SUBJECT) == replace(LEARNED, learned_until=100.0)


def test_an_engine_that_learned_nothing_leaves_the_file_alone(path: Path) -> None:
    keep(path, LEARNED, now=lambda: 1.7e9)
    LearnedKeeper(path, lambda: LEARNED).close()
    LearnedKeeper(path, lambda: None).close()
    found = read_learned(path, SUBJECT)
    assert found is not None
    assert found.learned_until == 1.7e9


def test_a_directory_that_is_gone_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.heterocache").propagate = True
    profiles = (learned(float(n)) for n in range(1, 4))
    LearnedKeeper(tmp_path / "none" / "learned.json", lambda: next(profiles), 0.01).close()
    assert caplog.text.count("cannot be kept") == 1


def test_pace_and_reuse_go_on_where_they_were() -> None:
    assert LEARNED.pace is not None
    assert LEARNED.reuse is not None
    times = ThinkTimes(pace=LEARNED.pace)
    assert times.pace == LEARNED.pace
    assert ThinkTimes().on_turn_end("new", 0.0) is None
    assert times.on_turn_end("new", 0.0) is not None, "what all sessions do is known"
    policy = Adaptive(SIZES, past=LEARNED.reuse)
    assert policy.past == LEARNED.reuse


def test_what_few_samples_taught_is_left_out() -> None:
    costs = CostModel(ComputeRegression(), LoadModel([KV]))
    for _ in range(3):
        costs.load.observe(Tier.SSD, {KV: 10_000}, 2e-3)
        costs.interference.observe(StepMix(1, 1, 1, 1), 2e-3)
    few = CostProfile.of(costs, "", SUBJECT, min_samples=8)
    assert (few.load, few.interference, few.interference_error) == ({}, None, None)
    assert not costs.compute.is_measured()
    again = LEARNED.cost_model([KV])
    unused = CostProfile.of(again, "", SUBJECT, min_samples=8)
    assert unused.load.keys() == {Tier.SSD}, "what a profile knew stays, without a load since"
    assert unused.interference == pytest.approx(LEARNED.interference)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda p: p.write_bytes(b""), "it is not JSON"),
        (lambda p: p.write_bytes(p.read_bytes()[:-200]), "it is not JSON"),
        (lambda p: p.write_bytes(b'{"format": 2}'), "format 2, this version reads 3"),
        (lambda p: p.write_bytes(b" " * (2 << 20)), "more than"),
        (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "no regular file"),
        (lambda p: (p.rename(p.with_name("x")), p.symlink_to("x")), "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_and_ignored(
    path: Path, spoil: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.heterocache").propagate = True
    keep(path, LEARNED)
    spoil(path)
    assert recall(path, SUBJECT) is None
    assert len(caplog.records) == 1
    assert problem in caplog.text


def test_another_machines_file_is_said_and_ignored(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.heterocache").propagate = True
    keep(path, LEARNED)
    assert recall(path, replace(SUBJECT, machine="another")) is None
    assert "machine 'a processor, 2 cores' there, 'another' here" in caplog.text
    assert recall(path.with_name("none"), SUBJECT) is None


numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
values = st.recursive(numbers, lambda x: st.lists(x, max_size=9), max_leaves=9)


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in inner:
        found.append((*at, key))
        if isinstance(value, dict | list):
            found += places(value, (*at, key))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_whatever_a_file_says_an_engine_starts_and_learns(path: Path, data: st.DataObject) -> None:
    """One value is replaced by anything: it is refused, or what starts from it works."""
    content = json.loads(LEARNED.as_bytes())
    *above, last = data.draw(st.sampled_from(places(content)))
    place = content
    for key in above:
        place = place[key]
    place[last] = data.draw(values)
    path.write_text(json.dumps(content))
    try:
        found = read_learned(path, SUBJECT)
    except ValueError:
        return
    assert found is not None
    costs = found.cost_model([KV])
    for turn in range(3):
        costs.compute.observe(100, 1000, 1e-2)
        costs.load.observe(Tier.SSD, {KV: 10_000}, 1e-3, while_computing=True)
        costs.load.on_declined(Tier.SSD, 10_000, 600.0 * turn)
    assert costs.compute.predict(10.0, 0.0) >= 0.0
    assert costs.load.predict(Tier.SSD, {KV: 1000}) >= 0.0
    times = ThinkTimes(pace=found.pace)
    times.on_turn_end("a", 0.0, 10.0)
    times.on_turn_start("a", 10.0)
    window = times.on_turn_end("a", 20.0)
    assert window is None or 20.0 <= window.earliest_s <= window.latest_s
    assert 0.0 <= times.return_probability(1.0, 10.0) <= 1.0
    policy = Adaptive(SIZES, past=found.reuse)
    policy.observe(Reuse(5, 1, 0, 3))
    assert policy.should_keep(Boundary(1, turn_end=True))
    CostProfile.from_json(replace(found, pace=times.pace, reuse=policy.past).as_bytes())


@pytest.mark.engine
def test_the_next_engine_decides_with_what_the_first_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path), "ssd_gib": 0.2, "planner": "cost"}
    prompts = [prompt_tokens(n, seed=n) for n in (1400, 700, 300)]
    arguments: dict[str, Any] = {"max_num_batched_tokens": 512}
    with engine("dense", extra, **arguments) as llm:
        for prompt in prompts:
            generate(llm, prompt, max_tokens=20)
            forget_local(llm)
            generate(llm, prompt, max_tokens=2)
        costs = scheduler_side(llm).costs
        assert costs.compute.samples >= 8
        taught = costs.compute.predict(512.0, 1024.0)
    (file,) = tmp_path.glob("*/learned.json")
    # Only now: vLLM configures its loggers, which do not propagate, when it is imported.
    logger = logging.getLogger("vllm.heterocache")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    with engine("dense", extra, **arguments) as llm:
        assert "the planner starts from costs learned on" in caplog.text
        assert "recovered" in caplog.text
        side = scheduler_side(llm)
        assert side.costs.compute.samples == 0
        assert side.costs.compute.predict(512.0, 1024.0) == pytest.approx(taught, rel=1e-3)
        (status,) = (x.status for x in engines.choose(str(os.getpid())).running)
        assert status["engine"]["costs_from"].startswith("learned on ")
    before = file.read_bytes()
    content = json.loads(before)
    content["subject"]["machine"] = "another machine"
    file.write_text(json.dumps(content))
    caplog.clear()
    with engine("dense", extra, **arguments) as llm:
        assert "what was learned before is not used" in caplog.text
        assert not scheduler_side(llm).costs.compute.is_measured()
        assert generate(llm, prompts[0]).num_cached_tokens > 0, "a guess favours loading"
    assert json.loads(file.read_bytes()) == content, "a start that learned little keeps nothing"
