"""Plays a session through the proxy, then the same session on a single server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from examples.agent_session import AgentSession
from examples.disaggregated_prefill.fleet import CHUNK, VOCABULARY, Fleet, value
from examples.serving import Reply, Server, logprob_distance

REPLY_TOKENS = 40
"""Longer than the shortest boundary of most models, so prefillers read decoded state, too."""
_AFTER_A_BOUNDARY = 24
"""Tokens of every prompt after its last chunk: too few for a shorter boundary."""
_SETTLED_S = 2.2
"""An idle store publishes its contents every second or two."""
_SETTLE_TIMEOUT_S = 20.0


@dataclass
class Turn:
    """One request through the proxy."""

    prompt: list[int]
    reply: Reply
    prefillers_from_peers: int
    """Tokens that prefillers restored from other servers."""
    from_peer: int
    """Tokens that the decoder restored from a prefiller."""
    moved_bytes: int
    """Bytes moved between servers."""
    alone_ttft_s: float = 0.0
    """TTFT on one server, whose own prefix cache has the turn before."""
    hit: Reply | None = None
    """That server's answer when its own prefix cache has this turn."""

    @property
    def distance(self) -> float:
        """The largest difference of a logprob from `hit`."""
        assert self.hit is not None
        return logprob_distance(self.hit, self.reply)


@dataclass
class Outcome:
    """The results of one model."""

    model: str
    turns: list[Turn] = field(default_factory=list)
    stored_bytes: float = 0.0
    """Bytes in all DRAM tiers."""
    replica_bytes: float = 0.0
    """The bytes of them that another server owns."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed transfers and checks, by cause."""

    @property
    def distinct_bytes(self) -> float:
        """Bytes in the DRAM tiers of their owners: every artifact has one."""
        return self.stored_bytes - self.replica_bytes

    @property
    def duplicate_factor(self) -> float:
        """Bytes in all DRAM tiers over the distinct ones."""
        return self.stored_bytes / self.distinct_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes moved between servers in all turns."""
        return sum(turn.moved_bytes for turn in self.turns)

    def problems(self) -> list[str]:
        """Return a line for each result that a user should not accept."""
        found = []
        tolerance = 0.0 if self.model == "deepseek_v4" else 1e-4
        for number, turn in enumerate(self.turns, 1):
            if not turn.from_peer:
                found.append(f"turn {number}: the decoder restored nothing from its peer")
            if turn.hit is None:
                continue
            # A handoff may end between the boundaries of the engine's own prefix cache.
            if (turn.reply.cached_tokens or 0) < (turn.hit.cached_tokens or 0):
                found.append(
                    f"turn {number}: {turn.reply.cached_tokens} cached tokens, fewer than the "
                    f"{turn.hit.cached_tokens} of the own prefix hit"
                )
            if turn.distance > tolerance:
                found.append(f"turn {number}: logprobs differ by {turn.distance:.2g}")
        if self.failures:
            found.append(f"transfers or checks failed: {dict(self.failures)}")
        return [f"{self.model}: {problem}" for problem in found]


def play(
    fleet: Fleet, task_chunks: int = 12, turns: int = 4, seed: int = 1, *, alone: bool = True
) -> Outcome:
    """Play a session of `turns` requests, the first with about `task_chunks` chunks.

    `alone`: then play it again on a single server, as the reference.
    """
    model = fleet.decoder.model
    outcome = Outcome(model.name)
    session = AgentSession(model / "tokenizer.json", seed)
    warm_up(fleet)
    before = _stored_bytes(fleet)
    session.add_text(task_chunks * CHUNK + _AFTER_A_BOUNDARY)
    for _ in range(turns):
        turn = _turn(fleet, session.tokens)
        outcome.turns.append(turn)
        session.add_reply(turn.reply.tokens)
        session.add_text(CHUNK)
        session.add_text(-len(session.tokens) % CHUNK + _AFTER_A_BOUNDARY)
    outcome.stored_bytes, outcome.replica_bytes = (
        now - then for now, then in zip(_stored_bytes(fleet), before, strict=True)
    )
    for turn in outcome.turns if alone else ():
        _play_alone(fleet.prefillers[0], turn)
    for server in fleet.servers:
        outcome.failures.update(_failures(server))
    return outcome


def warm_up(fleet: Fleet) -> None:
    """Send the first requests of each process, which pay for lazy initialisation."""
    prompt = AgentSession(fleet.decoder.model / "tokenizer.json").draw_text(
        CHUNK + _AFTER_A_BOUNDARY
    )
    for server in fleet.servers:
        server.complete(prompt, REPLY_TOKENS, VOCABULARY, cache_salt=f"warm-up {server.port}")


def _turn(fleet: Fleet, tokens: list[int]) -> Turn:
    prompt = list(tokens)
    restored = [_restored(server) for server in fleet.servers]
    moved = _moved_bytes(fleet)
    reply = fleet.proxy.complete(prompt, REPLY_TOKENS, VOCABULARY, session_id="agent")
    gained = [now - then for now, then in zip(map(_restored, fleet.servers), restored, strict=True)]
    return Turn(prompt, reply, sum(gained[:-1]), gained[-1], _moved_bytes(fleet) - moved)


def _play_alone(server: Server, turn: Turn) -> None:
    """Serve the turn on one server, first without its state in any cache, then with it."""
    salt = "alone"  # nothing is stored under it
    turn.alone_ttft_s = server.complete(turn.prompt, 1, 0, cache_salt=salt).ttft_s
    turn.hit = server.complete(turn.prompt, REPLY_TOKENS, VOCABULARY, cache_salt=salt)


def _failures(server: Server) -> Counter[str]:
    server.complete([1, 2, 3], max_tokens=1)  # an engine publishes metrics with a step
    found: Counter[str] = Counter()
    for labels, count in server.series("heterocache_failures_total"):
        found[f"{labels['tier']}: {labels['cause']}"] += int(count)
    return +found


def _stored_bytes(fleet: Fleet) -> tuple[float, float]:
    """Wait until claims are settled; return the bytes in all DRAM tiers and in replicas."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    seen = (-1.0, -1.0)
    while (now := _stored_bytes_now(fleet)) != seen:
        if time.monotonic() > deadline:
            raise RuntimeError("the stored bytes keep changing")
        seen = now
        time.sleep(_SETTLED_S)
    return seen


def _stored_bytes_now(fleet: Fleet) -> tuple[float, float]:
    return (
        sum(value(server, "bytes", tier="dram") for server in fleet.servers),
        sum(value(server, "replica_bytes") for server in fleet.servers),
    )


def _restored(server: Server) -> int:
    return int(value(server, "hit_tokens", tier="peer"))


def _moved_bytes(fleet: Fleet) -> int:
    return int(sum(value(server, "read_bytes", tier="peer") for server in fleet.servers))
