"""Two scheduler sides that share a cache: a directory in memory, reads within the process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from hetero_connector.engine.scheduler import peer_matcher, sessions
from hetero_connector.engine.scheduler.handoff import handoff_answer, handoff_tokens
from hetero_connector.store.catalog import writes
from hetero_connector.store.catalog.index import MAX_TAILS
from hetero_connector.store.peers.card import PeerCard
from ownership.directory import Claim, breaker
from ownership.directory.memory import MemoryDirectory
from ownership.member import fleet_worker
from ownership.member.fleet_worker import FleetWorker
from tests.clock import Clock
from tests.engine.fakes import DENSE, HYBRID, FakeRequest
from tests.engine.stepped import CHUNK, LOAD_DEADLINE_S, Engine, tokens
from tests.engine.stepped_fleet import WAIT_S, Fleet, chunk_bytes, joined
from tests.waiting import until

PROMPT = tokens(3 * CHUNK + 40)


@pytest.fixture(params=[DENSE, HYBRID], ids=["dense", "hybrid"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with joined(request.param) as made:
        yield made


def test_an_engine_restores_the_other_engines_state(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    assert ann.run(FakeRequest("a", PROMPT)) == 0
    fleet.settle(ann)
    # The prompt's end lies past the last boundary that a request for it may resume at.
    restored = bob.run(FakeRequest("b", PROMPT))
    assert restored == 3 * CHUNK + 32
    assert fleet.count(bob, "heterocache_hit_tokens", tier="peer") == restored
    assert fleet.count(bob, "heterocache_directory_lookups", outcome="found") == 1


@pytest.mark.parametrize("num_tokens", [4 * CHUNK, 3 * CHUNK + 48])
def test_a_chunk_that_ends_with_the_prompt_is_read_from_a_peer_too(
    fleet: Fleet, num_tokens: int
) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    prompt = tokens(num_tokens, seed=8)
    ann.run(FakeRequest("a", prompt))
    fleet.settle(ann)
    is_dense = not bob.layout.model.boundary_types
    assert bob.run(FakeRequest("b", prompt)) == (num_tokens - 16 if is_dense else 3 * CHUNK)
    assert fleet.count(bob, "heterocache_failures", tier="peer") == 0


def test_a_read_artifact_is_a_listed_replica_and_not_a_second_owner(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    owners = {record.owner for record in fleet.records(ann).values()}
    assert len(owners) == 1
    bob.run(FakeRequest("b", PROMPT))
    fleet.settle(bob)
    until(lambda: all(h.replicas for h in fleet.records(bob).values()))
    assert {record.owner for record in fleet.records(bob).values()} == owners
    assert all(a.replica for a in bob.store.catalog.tiers.index.artifacts())


def test_state_that_both_computed_is_written_to_ssd_by_its_owner_only(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    ssd = {"ssd_bytes": 1 << 20}
    ann = fleet.join("ann", ssd_dir=tmp_path / "ann", **ssd)
    bob = fleet.join("bob", ssd_dir=tmp_path / "bob", **ssd)
    fleet.directory.fails = True  # so that both compute
    for engine in (ann, bob):
        assert engine.run(FakeRequest("a", PROMPT)) == 0
        fleet.settle(engine)
    for engine in (ann, bob):
        assert engine.store.flush(WAIT_S)
    assert all(a.ssd is not None for a in ann.store.catalog.tiers.index.artifacts())
    assert all(a.ssd is None for a in bob.store.catalog.tiers.index.artifacts())
    until(lambda: all(h.copy.on_ssd for h in fleet.records(ann).values()))


def test_evicted_artifacts_are_not_requested_from_their_owner(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    known = fleet.records(ann)
    ann.side.reset()
    chain = [artifact.chunk for artifact in known]

    def released() -> bool:
        view = MemoryDirectory.lookup(fleet.directory, chain)
        return not any(view.copies_in(x) for types in view.chunks for x in types.values())

    until(released)
    assert bob.run(FakeRequest("b", PROMPT)) == 0
    assert fleet.count(bob, "heterocache_failures", tier="peer") == 0


def test_a_replica_becomes_its_holders_own_when_the_owner_is_gone(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob", listing_ttl_s=0.3)
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    bob.run(FakeRequest("b", PROMPT))
    fleet.settle(bob)
    ann.side.close()
    until(lambda: all(a.token for a in bob.store.catalog.tiers.index.artifacts()))
    assert not any(a.replica for a in bob.store.catalog.tiers.index.artifacts())
    third = fleet.join("cay")
    assert third.run(FakeRequest("c", PROMPT)) == 3 * CHUNK + 32


def test_a_dead_owners_ssd_is_adopted_under_new_tokens(fleet: Fleet, tmp_path: Path) -> None:
    def ssd(name: str) -> dict[str, Any]:
        return {"ssd_dir": tmp_path / name, "ssd_bytes": 1 << 20, "adopt_from": tmp_path}

    ann, bob, cay = fleet.join("ann", **ssd("a")), fleet.join("bob", **ssd("b")), fleet.join("cay")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    until(lambda: all(record.copy.on_ssd for record in fleet.records(ann).values()))
    tokens_before = {a: record.token for a, record in fleet.records(ann).items()}
    ann.side.close()
    assert bob.run(FakeRequest("b", PROMPT)) == 3 * CHUNK + 32
    assert fleet.count(bob, "heterocache_adopted_bytes") > 0
    assert fleet.count(bob, "heterocache_hit_tokens", tier="ssd") == 3 * CHUNK + 32
    assert fleet.count(bob, "heterocache_hit_tokens", tier="peer") == 0
    fleet.settle(bob)
    adopted = {a: record for a, record in fleet.records(bob).items() if a in tokens_before}
    assert adopted
    assert all(record.token > tokens_before[a] for a, record in adopted.items())
    until(lambda: all(record.copy.on_ssd for record in fleet.records(bob).values()))
    # It has a new owner: it is read from there and not adopted again.
    assert cay.run(FakeRequest("c", PROMPT)) == 3 * CHUNK + 32
    assert fleet.count(cay, "heterocache_adopted_bytes") == 0


def test_chunks_used_by_a_peers_session_are_evicted_last_at_their_owner(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_worker, "RENEWALS_PER_LEASE", 100)  # what is periodic comes soon
    monkeypatch.setattr(sessions, "_PROTECTED_S", 0.0)
    ann, bob = fleet.join("ann", dram_bytes=6 * chunk_bytes(fleet)), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    monkeypatch.setattr(sessions, "_PROTECTED_S", 3_600.0)
    assert bob.run(FakeRequest("b", PROMPT)) == 3 * CHUNK + 32
    monkeypatch.setattr(sessions, "_PROTECTED_S", 0.0)
    ann.run(FakeRequest("other", tokens(2 * CHUNK, seed=30)))
    until(lambda: bool(ann.store.catalog.users.foreign_ends()))
    for seed in range(31, 35):
        ann.run(FakeRequest(f"other {seed}", tokens(2 * CHUNK, seed=seed)))
    assert ann.run(FakeRequest("again", PROMPT)) >= 3 * CHUNK


def test_a_peers_chunks_continue_the_own_chain(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    bob.run(FakeRequest("b", PROMPT[: CHUNK + 10]))
    fleet.settle(bob)
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    assert bob.run(FakeRequest("c", [*PROMPT, *tokens(3 * CHUNK, seed=5)])) == 3 * CHUNK + 32
    assert fleet.count(bob, "heterocache_hit_tokens", tier="peer") == 2 * CHUNK + 32
    assert fleet.count(bob, "heterocache_hit_tokens", tier="dram") == CHUNK


def test_a_stopped_peer_costs_its_deadline_and_the_prompt_is_computed(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    assert ann.store.sharing is not None
    fleet.network.stopped.add(PeerCard.decode(ann.store.sharing.card).agent)
    assert bob.run(FakeRequest("b", PROMPT)) == 0
    assert fleet.count(bob, "heterocache_failures", tier="peer", cause="deadline") > 0


def test_a_replica_is_read_if_the_owner_is_dead(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    bob.run(FakeRequest("b", PROMPT))
    fleet.settle(bob)
    until(lambda: all(h.replicas for h in fleet.records(bob).values()))
    cay = fleet.join("cay")
    assert ann.store.sharing is not None
    fleet.network.kill(PeerCard.decode(ann.store.sharing.card).agent)
    assert cay.run(FakeRequest("c", PROMPT)) == 3 * CHUNK + 32
    assert fleet.count(cay, "heterocache_failures", tier="peer", cause="io_error") > 0


def test_an_owner_that_serves_no_more_is_fenced(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    assert ann.store.sharing is not None
    ann.store.sharing.serve_under(0)  # by its own clock its lease has ended
    assert bob.run(FakeRequest("b", PROMPT)) == 0
    assert fleet.count(bob, "heterocache_failures", tier="peer", cause="fenced") > 0


def test_a_slow_directory_costs_one_deadline_and_is_asked_again_when_it_answers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 2.0)
    ann, bob = fleet.join("ann"), fleet.join("bob", lookup_s=0.15)
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    fleet.directory.answers.clear()
    assert bob.run(FakeRequest("b", PROMPT)) == 0
    assert fleet.count(bob, "heterocache_directory_lookups") == 0, "it waited for the answer"
    asked = fleet.directory.asked
    for index in range(5):  # answered at once
        assert bob.ask(FakeRequest(f"c{index}", tokens(200, seed=index + 3))) == 0
    assert fleet.directory.asked == asked
    assert fleet.count(bob, "heterocache_directory_lookups", outcome="paused") == 5
    fleet.directory.answers.set()
    seeds = iter(range(100, 100_000))

    def answered() -> bool:
        bob.run(FakeRequest(f"d{next(seeds)}", tokens(200, seed=next(seeds))))
        return fleet.count(bob, "heterocache_directory_lookups", outcome="nothing") > 1

    until(answered)


def test_a_report_tells_no_answer_of_the_directory_from_nothing_stored(fleet: Fleet) -> None:
    bob = fleet.join("bob")

    def reason(prompt: list[int]) -> str | None:
        bob.run(FakeRequest("b", prompt, kv_transfer_params={"heterocache": {"report": True}}))
        return bob.side.predictions.recent()[-1].reason

    assert reason(PROMPT) == "nothing_stored"
    fleet.directory.fails = True
    assert reason(tokens(200, seed=3)) == "directory_late"
    assert reason(PROMPT) is None, "it is stored here"


def test_tenants_with_different_salts_share_nothing(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT, cache_salt="red"))
    fleet.settle(ann)
    assert bob.run(FakeRequest("b", PROMPT, cache_salt="blue")) == 0
    assert bob.run(FakeRequest("c", PROMPT)) == 0
    assert bob.run(FakeRequest("d", PROMPT, cache_salt="red")) == 3 * CHUNK + 32


def test_a_record_of_another_size_than_the_artifacts_is_a_counted_miss(fleet: Fleet) -> None:
    ann, bob = fleet.join("ann"), fleet.join("bob")
    ann.run(FakeRequest("a", PROMPT))
    fleet.settle(ann)
    claims = [
        Claim(artifact, record.copy._replace(size_bytes=record.copy.size_bytes - 1))
        for artifact, record in fleet.records(ann).items()
    ]
    owner = next(iter(fleet.records(ann).values())).owner
    fleet.directory.claim_owner(owner, claims)
    assert bob.run(FakeRequest("b", PROMPT)) == 0
    assert fleet.count(bob, "heterocache_failures", tier="peer", cause="bad_record") == len(claims)


PREFILLED = {"do_remote_prefill": True}


@pytest.mark.parametrize("length", [3 * CHUNK + 40, 3 * CHUNK + 16, 3 * CHUNK, 40])
def test_chunks_that_a_prefiller_is_sealing_are_waited_for(
    fleet: Fleet, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_matcher, "_HANDOFF_SHARE", LOAD_DEADLINE_S / WAIT_S)
    ann, bob = fleet.join("ann"), fleet.join("bob")
    prompt = tokens(length)
    request = FakeRequest("b", prompt, kv_transfer_params=PREFILLED)
    assert bob.ask(request) is None
    until(lambda: bob.ask(request) is None and fleet.directory.asked > 2)
    ann.run(FakeRequest("a", prompt))
    last = (length - 1) // 16 * 16
    if length % 16 == 0 and bob.layout.model.boundary_types:
        last = (length - 1) // CHUNK * CHUNK
    assert bob.run(request) == last


def test_a_handoff_keeps_what_it_has_found_if_the_directory_stops_answering(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_matcher, "_HANDOFF_SHARE", LOAD_DEADLINE_S / WAIT_S)
    ann, bob = fleet.join("ann"), fleet.join("bob")
    prompt = tokens(4 * CHUNK + 40)
    ann.run(FakeRequest("a", prompt[: 3 * CHUNK + 1]))
    fleet.settle(ann)
    answer = PREFILLED | {"prefilled_tokens": 4 * CHUNK + 32}
    request = FakeRequest("b", prompt, kv_transfer_params=answer)
    until(lambda: bob.ask(request) is None and fleet.directory.asked > 2)
    fleet.directory.fails = True
    until(lambda: bob.ask(request) is not None)
    assert bob.ask(request) == 3 * CHUNK


def test_an_empty_handoff_is_waited_for_only_briefly(fleet: Fleet) -> None:
    clock = Clock()
    bob = fleet.join("bob", clock=clock)
    request = FakeRequest("b", PROMPT, kv_transfer_params=PREFILLED)
    lookups = "heterocache_directory_lookups"
    until(lambda: bob.ask(request) is None and fleet.count(bob, lookups, outcome="nothing") == 1)
    assert bob.ask(request) is None
    clock.passes(LOAD_DEADLINE_S / peer_matcher._HANDOFF_SHARE)
    until(lambda: bob.ask(request) == 0)


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": False}, PREFILLED),
        ({"do_remote_decode": False}, None),
        (PREFILLED, None),
        ({}, None),
        (None, None),
        (["do_remote_decode"], None),
    ],
)
def test_a_remote_prefill_answers_with_the_decoders_parameters(
    params: Any, answer: dict[str, Any] | None
) -> None:
    request = FakeRequest("a", PROMPT, kv_transfer_params=params)
    for kept in (0, 7):
        assert handoff_answer(request, kept) == (answer and answer | {"prefilled_tokens": kept})


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (231, 231),
        (1, 1),
        (0, 0),
        *((what, None) for what in (232, -3, 2.0, True, False, "9", None)),
    ],
)
def test_a_decoder_accepts_only_possible_numbers_from_a_prefiller(
    answer: object, tokens: int | None
) -> None:
    request = FakeRequest("a", PROMPT, kv_transfer_params=PREFILLED | {"prefilled_tokens": answer})
    assert handoff_tokens(request, len(PROMPT) - 1) == tokens
    request.kv_transfer_params = {"prefilled_tokens": answer}
    assert handoff_tokens(request, len(PROMPT) - 1) is None


@pytest.mark.parametrize("length", [3 * CHUNK + 40, 3 * CHUNK + 16, 3 * CHUNK + 1, 40, 2])
def test_a_handoff_off_the_grid_is_found_and_waited_for(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_matcher, "_HANDOFF_SHARE", LOAD_DEADLINE_S / WAIT_S)
    prompt = tokens(length)
    with joined(replace(HYBRID, exact_handoffs=True)) as fleet:
        ann, bob = fleet.join("ann"), fleet.join("bob")
        answer = PREFILLED | {"prefilled_tokens": length - 1}
        request = FakeRequest("b", prompt, kv_transfer_params=answer)
        assert bob.ask(request) is None
        until(lambda: bob.ask(request) is None and fleet.directory.asked > 2)
        prefill = FakeRequest("a", prompt, kv_transfer_params={"do_remote_decode": True})
        ann.admit(prefill)
        ann.step(a=length)
        assert ann.finish(prefill) == length - 1
        ann.step()
        assert bob.run(request) == length - 1


def prefill(engine: Engine, name: str, prompt: list[int], **given: Any) -> dict[str, Any]:
    """Compute a prompt for another engine; return the parameters that a proxy sends it."""
    asked = {"do_remote_decode": True}
    request = FakeRequest(name, prompt, kv_transfer_params=asked, **given)
    engine.admit(request)
    engine.step(**{name: len(prompt)})
    answer = handoff_answer(request, engine.finish(request))  # type: ignore[arg-type]
    engine.step()
    assert answer is not None
    return answer


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decoders wait for a handoff longer than the tests do."""
    monkeypatch.setattr(peer_matcher, "_HANDOFF_SHARE", LOAD_DEADLINE_S / (10 * WAIT_S))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_chunks_without_space_at_the_prefiller_are_not_waited_for(fleet: Fleet, kept: int) -> None:
    ann = fleet.join("ann", dram_bytes=max(1, kept) * chunk_bytes(fleet))
    bob = fleet.join("bob")
    unknown = LoRARequest("gone", 1, "/nowhere/adapter")
    answer = prefill(ann, "a", PROMPT, lora_request=None if kept else unknown)
    fleet.settle(ann)
    request = FakeRequest("b", PROMPT, kv_transfer_params=answer)
    until(lambda: bob.ask(request) is not None)
    assert bob.run(request) == kept * CHUNK


def test_a_prefill_that_cannot_be_claimed_names_no_tokens(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = fleet.join("ann")
    assert prefill(ann, "a", PROMPT)["prefilled_tokens"] > 3 * CHUNK
    monkeypatch.setattr(FleetWorker, "accepts_claims", False)
    assert prefill(ann, "b", PROMPT)["prefilled_tokens"] == 0


@pytest.mark.usefixtures("patient")
def test_handoffs_side_by_side_all_arrive_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short prompts end in the same first chunk, each at another token."""
    prompts = [tokens(length, seed=length) for length in range(20, 62)]
    assert len(prompts) > MAX_TAILS
    with joined(DENSE) as fleet:
        ann, bob = fleet.join("ann"), fleet.join("bob")
        answers = [prefill(ann, f"a{n}", prompt) for n, prompt in enumerate(prompts)]

        def requests(name: str) -> list[FakeRequest]:
            return [
                FakeRequest(f"{name}{n}", prompt, kv_transfer_params=answer)
                for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]

        first = requests("b")
        until(lambda: None not in [bob.ask(request) for request in first])
        ends = [len(prompt) - 1 for prompt in prompts]
        assert [bob.run(request) for request in first] == ends
        monkeypatch.setattr(bob.side._peers, "_fleet", None)
        assert [bob.run(request) for request in requests("c")] == ends, "from bob's own store"


def test_a_prompt_shorter_than_a_chunk_is_not_asked_for(fleet: Fleet) -> None:
    bob = fleet.join("bob")
    assert bob.ask(FakeRequest("b", tokens(CHUNK))) == 0
    assert fleet.directory.asked == 0
