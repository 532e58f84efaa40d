"""Processes of one router hear what the others have named, and none waits for another."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest

from ownership.router.identity import ChainCache, NamedPart
from ownership.router.siblings import Siblings, make_siblings
from tests.ownership.router.bench import PATIENCE_S
from tests.ownership.router.identity.test_chains import PLAIN, turn
from tests.ownership.router.identity.tokenizers_of_kinds import model_tokenizer

TEXT = "".join(turn(random.Random(1), 200) for _ in range(40))
PART = NamedPart(b"", 0, bytes(32), [], 16)
Opening = Callable[[int], list[Siblings]]


@pytest.fixture
def opened() -> Iterator[Opening]:
    """Make siblings, whose sockets are closed at the end."""
    made: list[Siblings] = []

    def make(count: int) -> list[Siblings]:
        made.extend(make_siblings(count))
        return made

    yield make
    for one in made:
        for end in (one._inbox, *one._others):
            end.close()


def name_in_child(siblings: Siblings, pipe: Connection) -> None:
    """Send the number of tokens made for `TEXT` after so many parts have come."""

    async def heard(number: int) -> None:
        cache, all_came = ChainCache(seed=siblings.seed), asyncio.Event()
        come = 0

        def take_in(part: NamedPart) -> None:
            nonlocal come
            cache.take_in(part)
            come += 1
            if come == number:
                all_came.set()

        with siblings.listening(take_in):
            await all_came.wait()
        chain = cache.of_text(model_tokenizer("llama3"), TEXT, PLAIN, is_wrapped=False)
        pipe.send(chain.tokenized)

    asyncio.run(heard(pipe.recv()))


@pytest.mark.long
def test_another_process_knows_what_this_one_has_named(opened: Opening) -> None:
    ours, theirs = opened(2)
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    child = context.Process(target=name_in_child, args=(theirs, far_end))
    child.start()
    try:
        sent: list[NamedPart] = []
        cache = ChainCache(seed=ours.seed, on_named=sent.append)
        named = cache.of_text(model_tokenizer("llama3"), TEXT, PLAIN, is_wrapped=False)
        for part in sent:
            ours.tell(part)
        pipe.send(len(sent))
        assert pipe.poll(PATIENCE_S)
        assert pipe.recv() < named.tokenized / 20
    finally:
        child.kill()
        child.join()


def test_all_others_hear_a_part_and_the_sender_does_not(opened: Opening) -> None:
    processes = opened(3)
    heard: list[tuple[int, NamedPart]] = []

    async def tell() -> None:
        with (
            processes[0].listening(lambda part: heard.append((0, part))),
            processes[1].listening(lambda part: heard.append((1, part))),
            processes[2].listening(lambda part: heard.append((2, part))),
        ):
            processes[1].tell(PART)
            while len(heard) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(tell(), PATIENCE_S))
    assert sorted(number for number, _ in heard) == [0, 2]
    assert all(part == PART for _, part in heard)
    assert {x.num_processes for x in processes} == {3}


def test_a_process_that_reads_nothing_and_a_part_too_large_delay_no_other(opened: Opening) -> None:
    ours, theirs = opened(2)
    for _ in range(10_000):  # 320 MB, more than any socket keeps
        ours.tell(NamedPart(b"", 0, bytes(1 << 15), [], 16))
    ours.tell(NamedPart(b"", 0, bytes(1 << 24), [], 16))
    heard = 0

    async def listen() -> None:
        nonlocal heard

        def count(part: NamedPart) -> None:
            nonlocal heard
            heard += 1

        with theirs.listening(count):
            before = -1
            while heard > before:
                before = heard
                await asyncio.sleep(0.05)
            ours.tell(PART)
            while heard == before:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(listen(), PATIENCE_S))
    assert 1 < heard < 10_000


def test_processes_that_have_ended_disturb_the_last_one_no_more(opened: Opening) -> None:
    ours, *ended = opened(3)
    for other in ended:
        other._inbox.close()
    ours.tell(PART)

    async def listen() -> None:
        with ours.listening(lambda part: None):
            for other in ended[0]._others:
                other.close()  # of all others that write to our inbox, this process has one
            await asyncio.sleep(0.05)
            is_still_read = asyncio.get_running_loop().remove_reader(ours._inbox)
            assert not is_still_read  # its end would be read again and again

    asyncio.run(listen())
