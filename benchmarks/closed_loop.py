"""Send the sessions of a trace to an engine in this process, as clients with tools would.

The parts that a trace does not record are invented: text is random bytes, and a prompt that follows
an answer begins with the engine's own tokens. So prompts share exactly what the trace says.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ownership.simulator.traces.session import Request, Session, Trace

_BYTES = 256
_IDLE_S = 5e-4
_FLUSH_S = 60.0


class Clock(Protocol):
    """The time of the clients, in seconds since the clock was made."""

    def now_s(self) -> float:
        """Return the time."""
        ...

    def idle(self, due_s: float) -> None:
        """Wait at least a short time; nothing is due before `due_s`."""
        ...

    def computed(self) -> None:
        """Count a step that the engine has computed."""
        ...

    @property
    def waits_for_io(self) -> bool:
        """True if I/O of the store takes no time, so each step waits for its end."""
        ...


class WallClock:
    """The time of a real client."""

    def __init__(self) -> None:
        self._begun_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def idle(self, due_s: float) -> None:
        time.sleep(_IDLE_S)

    waits_for_io = False

    def computed(self) -> None:
        """Change nothing: the step took real time."""


class StepClock:
    """Every step takes the same time, and nothing else any, so a run can be repeated exactly."""

    waits_for_io = True

    def __init__(self, step_s: float) -> None:
        self._step_s, self._now_s = step_s, 0.0

    def now_s(self) -> float:
        return self._now_s

    def idle(self, due_s: float) -> None:
        self._now_s = max(self._now_s, due_s)

    def computed(self) -> None:
        self._now_s += self._step_s


@dataclass
class Sent:
    """The times of one request, in seconds since the start."""

    session: int
    index: int
    due_s: float
    prompt: list[int]
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""

    @property
    def ttft_s(self) -> float:
        """Seconds from its due time to its first token."""
        return self.first_token_s - self.due_s


class SessionText:
    """The token ids of one session's prompts."""

    def __init__(self, session: Session, number: int, seed: int) -> None:
        self._requests = session.requests
        self._number, self._seed = number, seed
        first = session.requests[0].blocks.runs
        name = first[0][0] if first and session.preamble_tokens else 0
        self._preamble = _text([seed, 0, name], session.preamble_tokens)
        self._texts: dict[int, list[int]] = {}
        """Prompt and answer of each answered request."""

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of a request whose parent was answered."""
        request = self._requests[index]
        head = self._preamble
        if request.parent is not None and self._continues(request, request.parent):
            head = self._texts[request.parent]
        new_tokens = request.input_tokens - len(head)
        return head + _text([self._seed, 1, self._number, index], new_tokens)

    def answered(self, index: int, prompt: list[int], answer: Sequence[int]) -> None:
        """Keep the engine's answer."""
        self._texts[index] = prompt + list(answer)

    def _continues(self, request: Request, parent: int) -> bool:
        """Return True if the prompt begins with its parent's answer, not with a summary."""
        before = self._requests[parent].answered
        assert before is not None, "the trace does not say where answers are"
        return request.blocks.shared_with(before) == before.num_blocks


@dataclass
class _Live:
    """A session under way."""

    session: Session
    text: SessionText
    start_s: float
    followers: dict[int, list[int]] = field(default_factory=dict)


class ClosedLoop:
    """Plays a trace on a `vllm.LLM` whose engine core runs in this process."""

    def __init__(self, llm: Any, trace: Trace, seed: int = 0) -> None:
        self._engine = llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._live = [_live(s, n, seed) for n, s in enumerate(trace)]
        self._due: list[tuple[float, int, int]] = []
        self._running: dict[str, Sent] = {}
        self.sent: list[Sent] = []
        """All requests in the order of their answers."""

    def play(self, clock: Clock | None = None) -> list[float]:
        """Play until all is answered and saved; return the seconds of each session.

        `clock`: by default the wall clock.
        """
        for number, live in enumerate(self._live):
            for index, request in enumerate(live.session.requests):
                if request.parent is None:
                    at_s = live.start_s + request.offset_s
                    heapq.heappush(self._due, (at_s, number, index))
        self._clock = clock or WallClock()
        scheduler = self._core.scheduler
        while self._due or scheduler.has_requests():
            self._send()
            if self._clock.waits_for_io:
                self._wait_for_io()
            if scheduler.has_requests():  # or saves to be reported
                self._step()
            else:
                self._clock.idle(self._due[0][0])
        ends = [
            max(sent.last_token_s for sent in self.sent if sent.session == number)
            for number in range(len(self._live))
        ]
        return [end_s - live.start_s for end_s, live in zip(ends, self._live, strict=True)]

    def _send(self) -> None:
        from vllm import SamplingParams

        while self._due and self._due[0][0] <= self._clock.now_s():
            due_s, number, index = heapq.heappop(self._due)
            live = self._live[number]
            prompt = live.text.prompt(index)
            parameters = SamplingParams(
                temperature=0.0,
                max_tokens=live.session.requests[index].output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            name = f"{number}-{index}"
            self._running[name] = Sent(number, index, due_s, prompt)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)

    def _step(self) -> None:
        before = self._computed_tokens()
        outputs = self._engine.step()
        if outputs or self._computed_tokens() != before:
            self._clock.computed()
        now_s = self._clock.now_s()
        for output in outputs:
            name = output.request_id
            sent = self._running[name]
            if not sent.first_token_s and output.outputs[0].token_ids:
                sent.first_token_s = now_s
                sent.cached_tokens = int(output.num_cached_tokens or 0)
            if output.finished:
                sent.last_token_s = now_s
                self._answered(self._running.pop(name), output.outputs[0].token_ids)

    def _wait_for_io(self) -> None:
        """Wait until the store has written and read all that is queued."""
        store = self._core.scheduler.connector._scheduler.store
        if not store.flush(_FLUSH_S):
            raise RuntimeError("the store did not reach the SSD in time")
        while any(store.reading_bytes.values()):
            time.sleep(_IDLE_S)

    def _computed_tokens(self) -> int:
        return sum(r.num_computed_tokens for r in self._core.scheduler.requests.values())

    def _answered(self, sent: Sent, answer: Sequence[int]) -> None:
        self.sent.append(sent)
        live = self._live[sent.session]
        live.text.answered(sent.index, sent.prompt, answer)
        for index in live.followers.get(sent.index, ()):
            request = live.session.requests[index]
            assert request.think_s is not None
            heapq.heappush(self._due, (sent.last_token_s + request.think_s, sent.session, index))


def _live(session: Session, number: int, seed: int) -> _Live:
    assert session.start_s is not None
    live = _Live(session, SessionText(session, number, seed), session.start_s)
    for index, request in enumerate(session.requests):
        if request.parent is not None:
            live.followers.setdefault(request.parent, []).append(index)
    return live


def _text(seed: Sequence[int], tokens: int) -> list[int]:
    text: list[int] = np.random.default_rng(seed).integers(0, _BYTES, tokens).tolist()
    return text
