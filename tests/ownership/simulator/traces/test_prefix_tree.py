from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.synthetic_sessions import CODING_AGENT, Constant, synthetic
from ownership.simulator.traces import prefix_tree
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.prefix_tree import PrefixTree, SharedPrefix, Touched
from ownership.simulator.traces.statistics import arrivals

prompts = st.lists(st.lists(st.integers(0, 4), max_size=9), max_size=12)


def shared_length(ids: list[int], others: list[int]) -> int:
    pairs = list(zip(ids, others, strict=False))
    return next((n for n, (id_, other) in enumerate(pairs) if id_ != other), len(pairs))


def test_three_prompts_worked_by_hand() -> None:
    tree = PrefixTree(first_name=100)
    opening = tree.add(BlockRuns(((1, 6),)), use=1)
    assert (opening.known_blocks, opening.names.runs, opening.touched) == (0, ((100, 6),), ())
    forked = tree.add(BlockRuns(((1, 4), (20, 2))), use=2)
    assert forked.known_blocks == 4
    assert forked.names.runs == ((100, 4), (106, 2))
    assert forked.touched == (Touched(4, last_use=1),)
    longer = tree.add(BlockRuns(((1, 9),)), use=3)
    assert longer.known_blocks == 6
    assert longer.names.runs == ((100, 6), (108, 3))
    assert longer.touched == (Touched(4, last_use=2), Touched(2, last_use=1))
    assert sorted(tree.prefixes(), key=lambda p: (p.depth_blocks, p.prompts)) == [
        SharedPrefix(0, 4, 3),
        SharedPrefix(4, 2, 1),
        SharedPrefix(4, 2, 2),
        SharedPrefix(6, 3, 1),
    ]
    tree.check_integrity()


@given(prompts)
def test_the_tree_agrees_with_a_list_of_all_prompts(prompts: list[list[int]]) -> None:
    tree = PrefixTree()
    for use, ids in enumerate(prompts):
        earlier = prompts[:use]
        shared = [shared_length(ids, other) for other in earlier]
        added = tree.add(BlockRuns.of_ids(ids), use)
        tree.check_integrity()
        assert added.known_blocks == max(shared, default=0)
        assert added.names.num_blocks == len(ids)
        last_uses = [
            max(other for other in range(use) if shared[other] > depth)
            for depth in range(added.known_blocks)
        ]
        assert [t.last_use for t in added.touched for _ in range(t.num_blocks)] == last_uses
    counted = sum(p.num_blocks * p.prompts for p in tree.prefixes())
    assert counted == sum(len(ids) for ids in prompts)
    distinct = {tuple(ids[:n]) for ids in prompts for n in range(1, len(ids) + 1)}
    assert sum(p.num_blocks for p in tree.prefixes()) == len(distinct) == tree.next_name


@given(prompts)
def test_names_are_the_same_in_a_second_tree_over_them(prompts: list[list[int]]) -> None:
    first, second = PrefixTree(), PrefixTree()
    for ids in prompts:
        names = first.add(BlockRuns.of_ids(ids)).names
        assert second.add(names).names == names


def test_a_prompt_costs_the_same_however_many_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = 0
    take_shared = prefix_tree._Rest.take_shared

    def counted(rest: prefix_tree._Rest, label: tuple[tuple[int, int], ...]) -> int:
        nonlocal visits
        visits += 1
        return take_shared(rest, label)

    monkeypatch.setattr(prefix_tree._Rest, "take_shared", counted)
    per_prompt = []
    for num_sessions in (20, 200):
        visits, prompts, tree = 0, 0, PrefixTree()
        spec = replace(CODING_AGENT, turns=Constant(20))
        trace = synthetic(spec, sessions=num_sessions, rate=0.05, block_tokens=64, seed=0)
        for arrival in arrivals(trace):
            tree.add(arrival.request.blocks, prompts)
            prompts += 1
        per_prompt.append(visits / prompts)
    assert per_prompt[0] > 5
    assert per_prompt[1] / per_prompt[0] < 1.1
