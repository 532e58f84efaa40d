"""The counters and fence of lookups whose answers the test gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Copy, Worker
from ownership.directory.breaker import FIRST_PAUSE_S
from ownership.directory.identifiers import Epoch, Token
from ownership.directory.memory import MemoryDirectory
from ownership.member.chain_lookup import DEADLINE_S, ChainLookups
from tests.ownership.member.members import change

ARTIFACT = change(1).id
OWN = Epoch(1_000)


class FakeThread:
    """Stands in for a `DirectoryThread` that answers on command, and for `LivePeers`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.directory = MemoryDirectory()
        self.seen: dict[ArtifactId, Token] = {}
        self._waiting: list[tuple[Callable[[Any, Epoch], Any], Future[Any]]] = []
        keeper: Any = SimpleNamespace(lease=SimpleNamespace(is_valid=True, epoch=OWN))
        stand_in: Any = self
        self.lookups = ChainLookups(stand_in, keeper, stand_in, Recorder(), clock=self._clock)

    def ask(self, job: Callable[[Any, Epoch], Any], deadline_s: float) -> Future[Any]:
        future = Future[Any]()
        self._waiting.append((job, future))
        return future

    def answer(self) -> None:
        for job, future in self._waiting:
            future.set_result(job(self.directory, OWN))
        self._waiting.clear()

    def note_tokens(self, tokens: Mapping[ArtifactId, Token]) -> None:
        self.seen.update(tokens)

    def was_live(self, epoch: Epoch) -> bool:
        return True

    def refresh(self, workers: Mapping[Epoch, Worker], asked_s: float) -> None:
        """Ignore it: no worker joins or ends."""

    def _clock(self) -> float:
        return self.now_s


def test_a_late_answer_counts_as_one_failure() -> None:
    fake = FakeThread()
    lookup = fake.lookups.find([ARTIFACT.chunk])
    assert not lookup.poll()
    fake.now_s = 2 * DEADLINE_S
    assert lookup.poll()
    assert fake.lookups._breaker._pause_s == FIRST_PAUSE_S
    fake.answer()
    assert fake.lookups._breaker._pause_s == FIRST_PAUSE_S
    assert lookup.found == ()


def test_questions_that_are_late_together_count_as_one_failure() -> None:
    fake = FakeThread()
    burst = [fake.lookups.find([ARTIFACT.chunk]) for _ in range(10)]
    fake.now_s = 2 * DEADLINE_S
    assert all(lookup.poll() for lookup in burst)
    fake.answer()
    assert fake.lookups._breaker._pause_s == FIRST_PAUSE_S
    fake.now_s += FIRST_PAUSE_S
    fake.lookups.find([ARTIFACT.chunk])  # the trial
    fake.now_s += 2 * DEADLINE_S
    fake.answer()
    assert fake.lookups._breaker._pause_s == 2 * FIRST_PAUSE_S


def test_an_answer_about_a_long_chain_may_take_longer() -> None:
    fake = FakeThread()
    chain = [ChunkKey(number.to_bytes(16, "big")) for number in range(4_096)]
    lookup = fake.lookups.find(chain)
    fake.now_s = 4.9 * DEADLINE_S
    assert not lookup.poll()
    fake.answer()
    assert lookup.poll()
    assert lookup.found == [{}] * len(chain)
    assert not fake.lookups._breaker.is_open
    lookup = fake.lookups.find(chain)
    fake.now_s += 5.1 * DEADLINE_S
    assert lookup.poll()
    assert lookup.found == ()


def test_a_takeover_is_recorded_even_if_its_copy_cannot_be_read() -> None:
    fake = FakeThread()
    bob = fake.directory.register(Worker("bob", b"card"), 60.0).epoch
    on_ssd = Copy(64, bytes(16), -1, 1, True)
    (grant,) = fake.directory.claim_owner(bob, [Claim(ARTIFACT, on_ssd)])
    lookup = fake.lookups.find([ARTIFACT.chunk])
    fake.answer()
    assert lookup.found == [{}], "nothing can be read"
    assert fake.seen == {ARTIFACT: grant.token}
