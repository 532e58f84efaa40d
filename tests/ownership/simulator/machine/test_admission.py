from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ownership.simulator.machine.admission import DecodePages

PAGE = 4


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 30),
)
def test_pages_are_the_sum_over_decodes(held: list[int], step: int, steps: int, free: int) -> None:
    decodes = DecodePages(PAGE)
    for tokens in (*held, 7):
        decodes.add(tokens, step)
    decodes.remove(7 + 5, step + 5)  # it has decoded five tokens meanwhile

    def needed(count: int) -> int:
        return sum(pages_of(tokens + count) - pages_of(tokens) for tokens in held)

    assert decodes.needed(step, steps) == needed(steps)
    fitting = decodes.fitting(step, steps, free)
    assert 0 <= fitting <= steps
    assert needed(fitting) <= free
    assert fitting == steps or needed(fitting + 1) > free
