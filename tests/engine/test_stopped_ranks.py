"""One of two workers is stopped, or killed, while the engine restores and saves.

They are tensor-parallel ranks or pipeline stages. Every artifact has parts of both. The worker that
runs on alone must not make the other's part count as saved, nor leave a load incomplete.
"""

from __future__ import annotations

import http.client
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from examples.checkpoints import write_checkpoint
from examples.disaggregated_prefill.fleet import value
from examples.serving import Reply, Server, kv_transfer_config
from hetero_connector.tools.verification import verify_model
from tests.engine.fleets import MAX_TOKENS, same, until
from tests.engine.harness import CHECKPOINTS, prompt_tokens
from tests.engine.process_group import assert_gone
from tests.engine.stages import TWO_STAGES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 2.0
STOPPED_S = 2.5 * DEADLINE_S
"""Seconds, longer than a load, a lookup and a read may take together."""
PROMPTS = [prompt_tokens(900 + 100 * i, seed=900 + i) for i in range(3)]
ROUNDS = 4
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def server_at(folder: Path) -> Server:
    """Return a server that is not started; the folder's name says which two workers it has."""
    given = {
        "dram_gib": 0.02,
        "ssd_dir": str(folder / "ssd"),
        "ssd_gib": 0.2,
        "planner": "always_load",
        "load_deadline_s": DEADLINE_S,
    }
    model, transfer = write_checkpoint("dense", CHECKPOINTS), kv_transfer_config(given)
    log = folder / "server.log"
    return Server(model, log, transfer, TWO_STAGES if folder.name == "stages" else TWO_RANKS)


@pytest.fixture(scope="module", params=["ranks", "stages"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return tmp_path_factory.mktemp(request.param, numbered=False)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with server_at(folder) as started:
        yield started


@pytest.fixture(scope="module")
def answers(server: Server) -> list[Reply]:
    """Return the answers from the engine's own prefix cache."""
    return [own_answer(server, prompt) for prompt in PROMPTS]


def own_answer(server: Server, prompt: Sequence[int]) -> Reply:
    server.complete(prompt, max_tokens=1)
    return server.complete(prompt, MAX_TOKENS)


def ranks_of(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.group).children(recursive=True)
    found = [child for child in children if "VLLM::Worker" in child.name()]
    assert len(found) == 2, [child.name() for child in children]
    return found


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def restored(server: Server, prompt: Sequence[int], answer: Reply) -> float:
    """Let the engine answer from the store; return the number of restored tokens."""
    before = value(server, "hit_tokens")
    server.reset_prefix_cache()
    same(server.complete(prompt, MAX_TOKENS), answer)
    return value(server, "hit_tokens") - before


class Asked(threading.Thread):
    """A request that is running."""

    def __init__(self, server: Server, prompt: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._ask = (server, prompt)
        self.reply: Reply | None = None

    def run(self) -> None:
        server, prompt = self._ask
        # The connection may break with the server; whatever that looks like is no answer.
        with suppress(OSError, RuntimeError, ValueError, http.client.HTTPException):
            self.reply = server.complete(prompt, MAX_TOKENS)

    def answered(self) -> Reply:
        self.join(120)
        assert self.reply is not None, "it hangs, or failed"
        return self.reply


def start(asked: Sequence[Asked]) -> None:
    for thread in asked:
        thread.start()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_stopped_for_longer_than_the_deadlines_changes_no_answer(
    server: Server, answers: list[Reply], rank: int
) -> None:
    rng = random.Random(rank)
    fresh = [prompt_tokens(800, seed=950 + ROUNDS * rank + i) for i in range(ROUNDS)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        until(lambda p=prompt, a=answer: restored(server, p, a) > 0, "it is stored")  # type: ignore[misc]
    saved: list[Reply] = []
    process = ranks_of(server)[rank]
    for number, prompt in enumerate(fresh):
        server.reset_prefix_cache()
        asked = [Asked(server, p) for p in (*PROMPTS, prompt)]
        if number > 0:
            start(asked)
            time.sleep(rng.random() * 0.3)
        with stopped(process):
            if number == 0:  # on a busy machine the others may end before the rank is stopped
                start(asked)
            time.sleep(STOPPED_S)
            assert number > 0 or not any(thread.reply for thread in asked), "it was not stopped"
        for thread, answer in zip(asked, answers, strict=False):
            same(thread.answered(), answer)
        saved.append(asked[-1].answered())
    for prompt, reply in zip(fresh, saved, strict=True):
        own = own_answer(server, prompt)
        same(reply, own)
        until(
            lambda p=prompt, a=own: restored(server, p, a) > 0, "what was saved meanwhile is used"
        )  # type: ignore[misc]
    assert value(server, "hook_errors") == 0
    assert value(server, "io_alive") == 1


def test_a_killed_rank_ends_the_engine_and_the_next_one_has_its_directory(
    folder: Path, server: Server, answers: list[Reply]
) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        same(server.complete(prompt, MAX_TOKENS), answer)
    until(lambda: value(server, "artifacts", tier="ssd") > 0, "something is on SSD")
    asked = [Asked(server, prompt) for prompt in PROMPTS]
    server.reset_prefix_cache()
    for thread in asked:
        thread.start()
    time.sleep(0.05)
    group = server.group
    ranks_of(server)[1].kill()
    server._process.wait(60)
    for thread in asked:
        thread.join(60)
        assert not thread.is_alive()
    assert_gone(group)
    (ssd,) = (path for path in (folder / "ssd").iterdir() if path.is_dir())
    report = verify_model(ssd)  # raises if the directory is locked
    assert not report.bad
    assert report.artifacts > 0
    with server_at(folder) as next_one:
        taken = 0.0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            taken += restored(next_one, prompt, answer)
        assert taken > 0, "nothing came from what the killed one had stored"
