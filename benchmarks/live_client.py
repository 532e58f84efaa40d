"""Clients with tools: they play sessions over HTTP, each request after the answer before it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.accounts import RequestName
from benchmarks.closed_loop import SessionText
from ownership.simulator.traces.session import Session, Trace

_TIMEOUT_S = 600.0


@dataclass
class Answered:
    """One request, with times in seconds since the start."""

    due_s: float
    prompt_tokens: int
    placement: str
    """The words of the router about it."""
    worker: str
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between tokens."""

    @property
    def prefill_worker(self) -> str:
        """The worker that computed the prompt."""
        found = re.search(r"; prefill=([^;]+)", self.placement)
        return found[1] if found else self.worker

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def answer_s(self) -> float:
        return self.last_s - self.due_s


@dataclass
class Played:
    """The sessions of a trace, as their clients saw them."""

    requests: dict[RequestName, Answered]
    task_s: list[float]
    """From a session's start to its last answer."""
    answers_s: list[float]
    """All waits of each session together."""
    span_s: float


async def play(url: str, model: str, trace: Trace, seed: int) -> Played:
    """Play a trace. `seed`: for the text of the prompts, which a trace does not record."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:
        player = _Player(client, model, time.perf_counter())
        sessions = list(trace)
        for number, session in enumerate(sessions):
            player.texts[number] = SessionText(session, number, seed)
        await asyncio.gather(*(player.session(n, s) for n, s in enumerate(sessions)))
    found = player.answered
    starts = [session.start_s or 0.0 for session in sessions]
    of_session: list[list[Answered]] = [[] for _ in sessions]
    for (number, _), request in found.items():
        of_session[number].append(request)
    return Played(
        found,
        [max(x.last_s for x in all_) - at for all_, at in zip(of_session, starts, strict=True)],
        [sum(x.answer_s for x in all_) for all_ in of_session],
        max(x.last_s for x in found.values()),
    )


class _Player:
    def __init__(self, client: aiohttp.ClientSession, model: str, begun_s: float) -> None:
        self._client, self._model, self._begun_s = client, model, begun_s
        self.texts: dict[int, SessionText] = {}
        self.answered: dict[RequestName, Answered] = {}

    async def session(self, number: int, session: Session) -> None:
        starts = [
            self._branch(number, session, index, (session.start_s or 0.0) + request.offset_s)
            for index, request in enumerate(session.requests)
            if request.parent is None
        ]
        await asyncio.gather(*starts)

    async def _branch(self, number: int, session: Session, index: int, due_s: float) -> None:
        """Send a request when it is due, and then those that wait for its answer."""
        await asyncio.sleep(max(0.0, due_s - self._now_s()))
        text = self.texts[number]
        prompt = text.prompt(index)
        request = session.requests[index]
        answered, tokens = await self._send(str(number), prompt, request.output_tokens, due_s)
        self.answered[number, index] = answered
        text.answered(index, prompt, tokens)
        followers = [
            self._branch(number, session, other, answered.last_s + (later.think_s or 0.0))
            for other, later in enumerate(session.requests)
            if later.parent == index
        ]
        await asyncio.gather(*followers)

    async def _send(
        self, session: str, prompt: Sequence[int], tokens: int, due_s: float
    ) -> tuple[Answered, list[int]]:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        found: list[int] = []
        async with self._client.post(
            "/v1/completions", json=body, headers={"x-session-id": session}
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            headers = answer.headers
            told = Answered(
                due_s,
                len(prompt),
                headers["x-heterocache-placement"],
                headers["x-heterocache-worker"],
            )
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                new = [
                    x for choice in event.get("choices", ()) for x in choice.get("token_ids") or ()
                ]
                if not new:
                    continue
                now_s = self._now_s()
                if found:
                    told.gaps_s += [(now_s - told.last_s) / len(new)] * len(new)
                else:
                    told.first_s = now_s
                found += new
                told.last_s = now_s
        if len(found) != tokens:
            raise RuntimeError(f"an answer of {len(found)} tokens, not {tokens}")
        return told, found

    def _now_s(self) -> float:
        return time.perf_counter() - self._begun_s
