"""Random sessions, the same for every engine that plays them.

`record` talks to a reference engine, because a session's next prompt contains its last
answer; `play` repeats that traffic on another engine with everything going on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.engine.harness import Completion, _completion, generate, prompt_tokens

_MAX_PROMPT_TOKENS = 1300
_SESSIONS = 6


@dataclass(frozen=True)
class Ask:
    """One request; an aborted one (after `abort_after` engine steps) has no answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    abort_after: int | None = None
    seed: int | None = None
    """The seed of random tokens; None for greedy ones."""

    @property
    def sampling(self) -> dict[str, Any]:
        if self.seed is None:
            return {"temperature": 0.0}
        return {"temperature": 1.0, "top_p": 0.95, "seed": self.seed}


@dataclass(frozen=True)
class Round:
    """Requests that are sent together, and the resets of the caches around them."""

    asks: tuple[Ask, ...]
    forget_local: bool
    """The engine's own prefix cache is emptied before."""
    reset_store_after: int | None
    """The store is emptied after this many engine steps, while the requests run."""


@dataclass
class Traffic:
    """Rounds and the reference's answers in the order of requests; None for aborted ones."""

    rounds: list[Round] = field(default_factory=list)
    answers: list[Completion | None] = field(default_factory=list)

    @property
    def asks(self) -> list[Ask]:
        return [ask for round_ in self.rounds for ask in round_.asks]


def record(llm: Any, seed: int, num_rounds: int, *, sampled: bool = False) -> Traffic:
    """Invent traffic; every answer is computed cold and alone. `sampled`: its tokens are random."""
    rng, traffic = Random(seed), Traffic()
    systems = [prompt_tokens(n, seed=seed * 100 + n) for n in (540, 810)]
    sessions = [list(rng.choice(systems)) for _ in range(_SESSIONS)]
    for number in range(num_rounds):
        asks = []
        crowd = number % 3 == 1  # often enough that blocks run short in a few rounds
        for index in rng.sample(range(_SESSIONS), 6 if crowd else rng.randint(2, 6)):
            ask = _long_ask(rng, sessions[index]) if crowd else _next_ask(rng, sessions[index])
            if sampled:
                ask = replace(ask, seed=len(traffic.answers))
            answer = None
            if ask.abort_after is None:
                llm.reset_prefix_cache()
                answer = generate(llm, ask.prompt, ask.max_tokens, **ask.sampling)
                sessions[index] = [*ask.prompt, *answer.tokens]
            if len(sessions[index]) > _MAX_PROMPT_TOKENS:
                sessions[index] = list(rng.choice(systems))
            asks.append(ask)
            traffic.answers.append(answer)
        reset = rng.randint(1, 8) if rng.random() < 0.06 else None
        traffic.rounds.append(Round(tuple(asks), rng.random() < 0.6, reset))
    return traffic


def _next_ask(rng: Random, session: Sequence[int]) -> Ask:
    """Return the session's next turn, or a fork somewhere in its past."""
    past = list(session)
    if rng.random() < 0.25:
        past = past[: rng.randint(1, len(past))]
    prompt = past + [rng.randrange(256) for _ in range(rng.choice((1, 7, 60, 200, 400)))]
    abort = rng.randint(1, 12) if rng.random() < 0.15 else None
    return Ask(tuple(prompt), rng.choice((1, 3, 16, 40)), abort)


def _long_ask(rng: Random, session: Sequence[int]) -> Ask:
    """Return one of several prompts that do not fit into a small KV cache together."""
    more = max(0, _MAX_PROMPT_TOKENS - len(session))
    return Ask((*session, *(rng.randrange(256) for _ in range(more))), 40)


def play(
    llm: Any,
    rounds: Sequence[Round],
    reset_store: Callable[[], None] | None = None,
    after_round: Callable[[], None] | None = None,
) -> list[Completion | None]:
    """Return the answers in the order of the requests."""
    answers: list[Completion | None] = []
    for number, round_ in enumerate(rounds):
        if round_.forget_local:
            llm.reset_prefix_cache()
        answers += _play_round(llm, number, round_, reset_store)
        if after_round is not None:
            after_round()
    return answers


def _play_round(
    llm: Any, number: int, round_: Round, reset_store: Callable[[], None] | None
) -> Iterator[Completion | None]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, names = llm.llm_engine, [f"{number}-{i}" for i in range(len(round_.asks))]
    for name, ask in zip(names, round_.asks, strict=True):
        parameters = SamplingParams(
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **ask.sampling,
        )
        engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, parameters)
    done, step = {}, 0
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        engine.abort_request(
            [n for n, a in zip(names, round_.asks, strict=True) if a.abort_after == step]
        )
        if reset_store is not None and round_.reset_store_after == step:
            reset_store()
    for name, ask in zip(names, round_.asks, strict=True):
        answered = ask.abort_after is None
        yield _completion(done[name]) if answered else None
