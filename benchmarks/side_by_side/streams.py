"""Streams of requests: sessions whose state has left HBM between turns, and prompts that never hit.

Both are sent to the contestant and to the engine without a connector, by turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.engine_process import prompt_tokens
from examples.serving import Reply, Server

_CONCURRENCY = 2
_SESSIONS, _TURNS = 3, 3
_FIRST_TOKENS, _TURN_TOKENS, _REPLY_TOKENS = 1500, 300, 8
_STREAM_PROMPTS, _STREAM_TOKENS = 4, 1000


def agent_sessions(server: Server, seed: int) -> float:
    """Play sessions whose prompts grow; return the mean time to first token after the first turns.

    The engine's own cache is emptied after each round of turns: other requests had its memory.
    """
    prompts = [prompt_tokens(_FIRST_TOKENS, 1000 * seed + i) for i in range(_SESSIONS)]
    times: list[float] = []
    for turn in range(_TURNS):
        if turn:
            server.reset_prefix_cache()
            prompts = [
                prompt + prompt_tokens(_TURN_TOKENS, 1000 * seed + 10 * turn + i)
                for i, prompt in enumerate(prompts)
            ]
        replies = _all(server, prompts, _REPLY_TOKENS)
        prompts = [p + reply.tokens for p, reply in zip(prompts, replies, strict=True)]
        times += [reply.ttft_s for reply in replies] if turn else []
    return statistics.mean(times)


def never_hits(server: Server, seed: int) -> float:
    """Send new prompts; return the seconds of all."""
    prompts = [prompt_tokens(_STREAM_TOKENS, 1000 * seed + 500 + i) for i in range(_STREAM_PROMPTS)]
    began = time.perf_counter()
    _all(server, prompts, _REPLY_TOKENS)
    return time.perf_counter() - began


def _all(server: Server, prompts: Sequence[list[int]], max_tokens: int) -> list[Reply]:
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, max_tokens), prompts))
