"""A prompt that goes on with an earlier one is its conversation; none other is."""

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.planner.sessions import Conversations

CHUNK, GRAIN = 16, 4
HASHER = ChainHasher(b"f", CHUNK)


class Talk:
    """Requests whose whole chain is stored, all of them."""

    def __init__(self, capacity: int = 64) -> None:
        self.conversations = Conversations(CHUNK, GRAIN, capacity)

    def turn(self, prompt: list[int], matched: int | None = None) -> int:
        chain = RequestChain(HASHER)
        chain.extend(prompt)
        full = len(prompt) // CHUNK if matched is None else matched
        conversation = self.conversations.of(chain, len(prompt), full)
        self.conversations.note(chain, len(prompt), conversation)
        return conversation


def text(seed: int, count: int) -> list[int]:
    return [seed * 1000 + i for i in range(count)]


def test_the_next_turn_continues_whatever_became_of_the_answer() -> None:
    talk = Talk()
    first = text(1, 40)
    conversation = talk.turn(first)
    second = [*first, *text(2, 30)]
    assert talk.turn(second) == conversation
    assert talk.turn([*second, *text(3, 50)]) == conversation
    assert len(talk.conversations) == 1


def test_a_common_beginning_is_not_a_continuation() -> None:
    talk, system = Talk(), text(0, 2 * CHUNK)
    one = talk.turn([*system, *text(1, 8)])
    other = talk.turn([*system, *text(2, 8)])
    assert one != other
    assert talk.turn([*system, *text(1, 8), *text(3, 40)]) == one
    assert talk.turn([*system, *text(2, 8), *text(4, 40)]) == other


def test_each_turn_is_continued_once() -> None:
    talk, prompt = Talk(), text(1, 40)
    first = talk.turn(prompt)
    assert talk.turn([*prompt, *text(2, 20)]) == first
    assert talk.turn([*prompt, *text(3, 20)]) != first, "asked again: a branch"


def test_what_is_no_longer_stored_is_not_looked_for() -> None:
    talk, prompt = Talk(), text(1, 40)
    first = talk.turn(prompt)
    assert talk.turn([*prompt, *text(2, 20)], matched=0) != first


def test_short_prompts_are_nobodys() -> None:
    talk = Talk()
    assert talk.turn(text(1, CHUNK - 1)) != talk.turn(text(1, CHUNK - 1))
    assert len(talk.conversations) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=40), st.integers(1, 8))
def test_never_two_conversations_in_one_and_bounded(
    turns: list[tuple[int, int]], capacity: int
) -> None:
    talk = Talk(capacity)
    prompts: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    for who, count in turns:
        prompts[who] = [*prompts.get(who, text(who, CHUNK)), *text(100 + who, count)]
        conversation = talk.turn(prompts[who])
        assert owner.setdefault(conversation, who) == who
        assert len(talk.conversations) <= capacity
        assert all(len(x) <= 8 for x in talk.conversations._turns.values())
