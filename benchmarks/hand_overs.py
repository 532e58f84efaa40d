"""What a hand-over costs beside both engines' own: prompts of drawn lengths, through a fleet.

Each is new to the servers, so nothing of it is hit. What its first token takes longer than a
simulation with the servers' profile says is the hand-over: HTTP three times, the proxy, the
prefiller's answer, and the directory until the decoder finds what it claims.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.accounts import RequestName
from examples.disaggregated_prefill.fleet import Fleet
from examples.serving import Reply, Server
from hetero_connector.planner.request_overhead import HandOver
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace

_PROMPTS = 14
_WARMING = 2
"""The first of them: what is set up late."""
_SHORTEST, _LONGEST = 64, 1_900
_ANSWERED = 8
_APART_S = 100.0
_TOKEN_IDS = 256


class Sent(NamedTuple):
    """One request, as its client saw it."""

    ttft_s: float
    answer_s: float
    """Until its last token."""
    reply: Reply


def send(proxy: Server, prompt: Sequence[int], output_tokens: int, session: str) -> Sent:
    """Send a request through the proxy and wait for its answer."""
    begun_s = time.perf_counter()
    reply = proxy.complete(prompt, output_tokens, 1, session_id=session)
    return Sent(reply.ttft_s, time.perf_counter() - begun_s, reply)


def hand_overs(fleet: Fleet, seed: int = 0) -> list[tuple[int, Sent]]:
    """Have prompts prefilled and decoded, one after the other: their tokens, and what they took."""
    rng = random.Random(seed)
    taken = []
    for _ in range(_PROMPTS):
        tokens = int(_SHORTEST * (_LONGEST / _SHORTEST) ** rng.random())
        prompt = [rng.randrange(_TOKEN_IDS) for _ in range(tokens)]
        taken.append((tokens, send(fleet.proxy, prompt, _ANSWERED, "hand-over")))
    for server in fleet.servers:
        server.reset_prefix_cache()
    return taken[_WARMING:]


def fitted(
    taken: Sequence[tuple[int, Sent]],
    block_tokens: int,
    simulated_s: Callable[[Trace], Mapping[RequestName, float]],
) -> HandOver:
    """`simulated_s`: first tokens of the same prompts, were handing over free."""
    sessions = [
        Session(
            str(number),
            (Request(0.0, tokens, _ANSWERED, _new_blocks(number, tokens // block_tokens)),),
            number * _APART_S,
        )
        for number, (tokens, _) in enumerate(taken)
    ]
    free_s = simulated_s(Trace("hand-overs", "made up", block_tokens, lambda: iter(sessions)))
    return HandOver.fitted(
        [(tokens, sent.ttft_s - free_s[number, 0]) for number, (tokens, sent) in enumerate(taken)]
    )


def _new_blocks(number: int, count: int) -> BlockRuns:
    return BlockRuns.of_runs([(1_000_000 * (number + 1), count)])
