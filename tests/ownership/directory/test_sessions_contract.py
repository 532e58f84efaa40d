"""The contract of every directory for sessions and hot groups."""

import pytest

from hetero_connector.artifacts.record import ROOT
from ownership.directory import NO_EPOCH, NO_TOKEN, Directory, Lease, Token
from ownership.directory.sessions import MAX_CHAIN_ENDS, MAX_THINK_TIMES, Session
from tests.ownership.fleet_bench import LEASE_S, LIMITS, DirectoryBench, artifact, chain, join

END = artifact().chunk


class TestSessions:
    def test_an_unknown_session_is_made_by_its_first_turn(
        self, directory: Directory, ann: Lease
    ) -> None:
        assert directory.sessions(["s", "t"]) == [None, None]
        granted, session = directory.begin_turn(ann.epoch, "s", "repo")
        assert granted
        assert session == Session("s", session.token, ann.epoch, ROOT, 0, "repo")
        assert session.token > NO_TOKEN
        assert directory.sessions(["t", "s"]) == [None, session]

    def test_a_turns_end_is_where_the_next_resumes(self, directory: Directory, ann: Lease) -> None:
        token = directory.begin_turn(ann.epoch, "s", "repo").session.token
        granted, session = directory.end_turn(ann.epoch, "s", token, END, 1_234)
        assert granted
        assert (session.boundary, session.boundary_tokens) == (END, 1_234)
        assert directory.sessions(["s"]) == [session]
        again = directory.begin_turn(ann.epoch, "s").session
        assert (again.boundary, again.boundary_tokens) == (END, 1_234)
        assert (again.token, again.group, again.turn_ended_s) == (token, "repo", None)

    def test_the_last_think_times_are_kept(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        seconds = [0.5 + i for i in range(MAX_THINK_TIMES + 3)]
        for think_s in seconds:
            directory.renew_lease(ann.epoch)
            token = directory.begin_turn(ann.epoch, "s").session.token
            directory.end_turn(ann.epoch, "s", token, END, 1)
            bench.advance(think_s / 2)
            directory.renew_lease(ann.epoch)
            bench.advance(think_s / 2)
        directory.renew_lease(ann.epoch)
        session = directory.begin_turn(ann.epoch, "s").session
        assert session.think_s == pytest.approx(seconds[-MAX_THINK_TIMES:], abs=0.4)
        assert directory.begin_turn(ann.epoch, "s").session.think_s == session.think_s

    def test_a_live_owner_keeps_its_session(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        session = directory.begin_turn(ann.epoch, "s").session
        assert directory.begin_turn(bob.epoch, "s") == (False, session)
        assert directory.begin_turn(bob.epoch, "s", expected=Token(session.token + 1)) == (
            False,
            session,
        )

    def test_a_caller_that_knows_the_token_moves_a_session_and_fences_the_old_owner(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        before = directory.begin_turn(ann.epoch, "s").session
        granted, moved = directory.begin_turn(bob.epoch, "s", expected=before.token)
        assert granted
        assert (moved.decode_owner, moved.token > before.token) == (bob.epoch, True)
        assert directory.begin_turn(ann.epoch, "s", expected=before.token) == (False, moved)
        assert directory.end_turn(ann.epoch, "s", before.token, END, 9) == (False, moved)
        assert directory.end_turn(ann.epoch, "s", moved.token, END, 9) == (False, moved)
        assert directory.end_turn(bob.epoch, "s", before.token, END, 9) == (False, moved)
        assert directory.end_turn(bob.epoch, "s", moved.token, END, 9).granted
        assert directory.begin_turn(bob.epoch, "s", expected=before.token).session.token == (
            moved.token
        )

    @pytest.mark.parametrize("how", ["expired", "left", "restarted"])
    def test_a_dead_owners_session_continues_elsewhere_at_its_boundary(
        self, directory: Directory, bench: DirectoryBench, ann: Lease, how: str
    ) -> None:
        before = directory.begin_turn(ann.epoch, "s").session
        directory.end_turn(ann.epoch, "s", before.token, END, 77)
        if how == "expired":
            bench.advance(LEASE_S + 0.1)
        elif how == "left":
            directory.end_lease(ann.epoch)
        else:
            join(directory, "ann")
        bob = join(directory, "bob")
        granted, session = directory.begin_turn(bob.epoch, "s")
        assert granted
        assert session.token > before.token
        assert (session.boundary, session.boundary_tokens) == (END, 77)

    def test_an_unknown_session_has_no_turn_to_end(self, directory: Directory, ann: Lease) -> None:
        assert directory.end_turn(ann.epoch, "s", NO_TOKEN, END, 1) == (False, Session("s"))
        assert directory.sessions(["s"]) == [None]
        assert Session("s").decode_owner == NO_EPOCH

    def test_a_clock_set_back_gives_no_negative_think_time(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        token = directory.begin_turn(ann.epoch, "s").session.token
        directory.end_turn(ann.epoch, "s", token, END, 1)
        bench.advance(-1e6)
        [think_s] = directory.begin_turn(ann.epoch, "s").session.think_s
        assert 0.0 <= think_s < 1.0

    def test_the_session_not_used_for_longest_is_forgotten_first(
        self, directory: Directory, ann: Lease
    ) -> None:
        names = [f"s{i}" for i in range(LIMITS.max_sessions)]
        for name in [*names, names[0], "new"]:
            directory.begin_turn(ann.epoch, name)
        known = {s.session_id for s in directory.sessions([*names, "new"]) if s is not None}
        assert known == {*names, "new"} - {names[1]}

    def test_a_session_not_used_for_long_is_forgotten(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        ann = join(directory, "ann", lease_s=10 * LIMITS.session_ttl_s)
        first = directory.begin_turn(ann.epoch, "s", "g").session
        bench.advance(LIMITS.session_ttl_s - 1.0)
        assert directory.sessions(["s"]) == [first]
        bench.advance(2.0)
        assert directory.sessions(["s"]) == [None]
        again = directory.begin_turn(ann.epoch, "s").session
        assert (again.group, again.token > first.token) == ("", True)

    @pytest.mark.parametrize("name", ["", "x" * 257, "ä" * 129])
    def test_a_bad_name_is_refused(self, directory: Directory, ann: Lease, name: str) -> None:
        with pytest.raises(ValueError, match="session_id"):
            directory.begin_turn(ann.epoch, name)
        with pytest.raises(ValueError, match="group"):
            directory.note_group(ann.epoch, name, END)

    def test_any_text_is_a_name(self, directory: Directory, ann: Lease) -> None:
        for name in ("a:b/{c}*", "\n\x00", "ä€𝄞"):
            session = directory.begin_turn(ann.epoch, name, name).session
            assert directory.sessions([name]) == [session]
            assert (session.session_id, session.group) == (name, name)


class TestGroups:
    def test_hot_groups_come_hottest_first_with_their_latest_chains(
        self, directory: Directory, ann: Lease
    ) -> None:
        ends = chain("ends", 3)
        for group, end in [("a", 0), ("b", 1), ("b", 2), ("b", 1)]:
            directory.note_group(ann.epoch, group, ends[end])
        b, a = directory.hot_groups(10)
        assert (a.name, b.name) == ("a", "b")
        assert (a.chain_ends, b.chain_ends) == ((ends[0],), (ends[2], ends[1]))
        assert (a.heat, b.heat) == (pytest.approx(1, rel=0.02), pytest.approx(3, rel=0.02))
        assert [g.name for g in directory.hot_groups(1)] == ["b"]

    def test_a_turn_is_a_use_of_the_sessions_group(self, directory: Directory, ann: Lease) -> None:
        directory.begin_turn(ann.epoch, "s", "repo")
        directory.begin_turn(ann.epoch, "s")
        directory.begin_turn(ann.epoch, "t")
        [group] = directory.hot_groups(10)
        assert (group.name, group.chain_ends) == ("repo", ())
        assert group.heat == pytest.approx(2, rel=0.02)

    def test_heat_halves_in_its_half_life(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        ann = join(directory, "ann", lease_s=10_000.0)
        for _ in range(8):
            directory.note_group(ann.epoch, "old", END)
        bench.advance(2 * LIMITS.group_half_life_s)
        for _ in range(3):
            directory.note_group(ann.epoch, "new", END)
        new, old = directory.hot_groups(10)
        assert (new.name, old.name) == ("new", "old")
        assert (new.heat, old.heat) == (pytest.approx(3, rel=0.02), pytest.approx(2, rel=0.02))

    def test_heat_survives_any_jump_of_the_clock(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        for jump_s in (1e6, -2e6):
            ann = join(directory, "ann")
            directory.note_group(ann.epoch, "g", END)
            bench.advance(jump_s)
            [group] = directory.hot_groups(1)
            assert group.heat >= 0.0

    def test_the_numbers_of_groups_and_chains_are_bounded(
        self, directory: Directory, ann: Lease
    ) -> None:
        ends = chain("ends", MAX_CHAIN_ENDS + 5)
        for end in ends:
            directory.note_group(ann.epoch, "hot", end)
        for index in range(2 * LIMITS.max_groups):
            directory.note_group(ann.epoch, f"g{index}", END)
        groups = directory.hot_groups(100)
        assert len(groups) == LIMITS.max_groups
        assert groups[0].name == "hot"
        assert groups[0].chain_ends == tuple(ends[-MAX_CHAIN_ENDS:])
        assert f"g{2 * LIMITS.max_groups - 1}" in {g.name for g in groups}
