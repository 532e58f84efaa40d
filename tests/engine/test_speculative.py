"""With speculative decoding restores are exact, and no window is replayed.

It runs in its own server: vLLM's n-gram proposer imports numba, and then no other engine can start
in the process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.checkpoints import write_checkpoint
from examples.demo import VOCABULARY
from examples.serving import Reply, Server, kv_transfer_config, logprob_distance
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.space import JOURNAL_NAME
from hetero_connector.tools import explanation
from hetero_connector.tools.inspection import find_models
from tests.engine.harness import CHECKPOINTS, flipped, prompt_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = prompt_tokens(200, seed=95) * 6
"""The prompt repeats itself, so that drafts are found in it."""
CLEAR = 0.02
"""A logprob difference that rounding cannot cause."""
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def same(one: Reply, other: Reply) -> bool:
    """Check that tokens and logprobs of the whole vocabulary are equal."""
    return one.tokens == other.tokens and logprob_distance(one, other) <= 1e-4


def answer(server: Server, prompt: list[int]) -> Reply:
    """Return twelve tokens with the logprobs of the whole vocabulary, also of accepted drafts."""
    reply = server.complete(prompt, max_tokens=12, num_logprobs=VOCABULARY)
    assert [len(step) for step in reply.top_logprobs] == [VOCABULARY] * 12
    return reply


def own_and_restored(server: Server, prompt: list[int]) -> tuple[Reply, Reply]:
    """Return the engine's own hit, and then the connector's."""
    own = answer(server, prompt)
    server.reset_prefix_cache()
    restored = answer(server, prompt)
    assert restored.cached_tokens == own.cached_tokens
    return own, restored


def test_restores_are_exact_and_replays_refused(tmp_path: Path) -> None:
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.2}
    transfer = kv_transfer_config(extra | {"checkpoints": "zero", "planner": "always_load"})
    model = write_checkpoint("gemma3", CHECKPOINTS)
    arguments = {"speculative_config": json.dumps(NGRAMS), "max_logprobs": VOCABULARY}
    with Server(model, tmp_path / "server.log", transfer, arguments) as server:
        first = server.complete(PROMPT, max_tokens=40)
        own, restored = own_and_restored(server, PROMPT)
        assert restored.cached_tokens == 1184
        assert same(restored, own)
        other = answer(server, flipped(PROMPT, 3))
        assert logprob_distance(own, other) > CLEAR
        # What was decoded was saved from pages into which rejected drafts were written too.
        turn = PROMPT + first.tokens + prompt_tokens(30, seed=96)
        server.reset_prefix_cache()
        server.complete(PROMPT, max_tokens=40)
        own, restored = own_and_restored(server, turn)
        assert restored.cached_tokens == 1216
        assert same(restored, own)
        drafts = dict.fromkeys(("draft", "accepted"), 0.0)
        for name in drafts:
            found = server.series(f"vllm:spec_decode_num_{name}_tokens_total")
            drafts[name] = sum(value for _, value in found)
        assert drafts["draft"] > drafts["accepted"]
        server.reset_prefix_cache()
        branch = PROMPT[:900] + prompt_tokens(100, seed=97)
        assert server.complete(branch, max_tokens=1).cached_tokens == 0
    (directory,) = find_models(tmp_path / "ssd")
    journal = Journal.open_existing(directory / JOURNAL_NAME, read_only=True)
    assert "speculative" in journal.meta.description["window_replay"]
    journal.close()
    shorter = PROMPT[:600] + prompt_tokens(100, seed=98)
    offered = explanation.decide(directory, shorter, None, in_dram=False).decision.candidates()
    assert [c.boundary for c in offered] == [0]  # not 512, which a replay could reach
