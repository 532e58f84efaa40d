"""The contract of every directory: leases, ownership, replicas, takeovers, chain users."""

from collections.abc import Callable

import pytest

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from hetero_connector.errors import DirectoryError, StaleEpochError
from ownership.directory import (
    NO_EPOCH,
    NO_TOKEN,
    Claim,
    Copy,
    Directory,
    Epoch,
    EpochStatus,
    Grant,
    GrantOutcome,
    Lease,
    RetiredEpochError,
    Token,
    Worker,
)
from tests.ownership.fleet_bench import (
    KV,
    LEASE_S,
    LIMITS,
    WINDOW,
    DirectoryBench,
    artifact,
    chain,
    claim,
    claim_of,
    copies_at,
    copy_of,
    join,
)

A, B = artifact("a"), artifact("b")


def owned(lease: Lease, token: Token) -> Grant:
    return Grant(GrantOutcome.OWNED, lease.epoch, token)


def owner_of(directory: Directory, what: ArtifactId) -> Epoch:
    found = directory.lookup([what.chunk]).chunks[0].get(what.state_type)
    return NO_EPOCH if found is None else found.owner


def everything(directory: Directory) -> object:
    """Return everything that can be read, except the time."""
    view = directory.lookup([A.chunk, B.chunk])
    return [dict(c) for c in view.chunks], directory.count_users([A.chunk])


class TestGenerations:
    """Resets of the whole fleet."""

    def test_each_reset_is_greater_than_all_before(self, directory: Directory) -> None:
        assert directory.generation().number == 0
        numbers = [directory.reset_generation() for _ in range(3)]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > 0
        assert directory.generation().number == numbers[-1]

    def test_workers_learn_of_a_reset_and_report_their_adoption(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        assert directory.generation().adopted == {"ann": 0, "bob": 0}
        number = directory.reset_generation()
        assert directory.report_generation(ann.epoch, 0, 0) == number
        assert directory.report_generation(ann.epoch, number, number) == number
        assert directory.generation().adopted == {"ann": number, "bob": 0}

    def test_only_live_workers_are_waited_for(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        directory.report_generation(ann.epoch, 3, 3)
        again = join(directory, "ann")
        assert directory.generation().adopted == {"ann": 0}
        with pytest.raises(StaleEpochError):
            directory.report_generation(ann.epoch, 3, 3)
        directory.report_generation(again.epoch, 3, 3)
        bench.advance(LEASE_S + 0.1)
        assert directory.generation().adopted == {}

    def test_a_directory_that_lost_its_memory_takes_over_the_reported_number(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        assert directory.report_generation(ann.epoch, 5, 5) == 5
        assert directory.report_generation(bob.epoch, 0, 3) == 5
        assert directory.reset_generation() > 5

    def test_a_directory_reset_since_its_loss_begins_another_generation(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        """An engine with a greater number has not seen that reset."""
        number = directory.reset_generation()
        floor = number + 10
        after = directory.report_generation(ann.epoch, floor, floor)
        assert after > floor
        assert directory.report_generation(bob.epoch, number, number) == after
        assert directory.report_generation(ann.epoch, after, after) == after

    def test_numbers_as_large_as_clocks_are_exact(self, directory: Directory, ann: Lease) -> None:
        large = 2**52 - 10
        assert directory.report_generation(ann.epoch, large, large) == large
        assert directory.generation().adopted == {"ann": large}
        assert directory.reset_generation() == large + 1

    def test_adoptions_of_ended_workers_are_forgotten(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        for _ in range(3 * LIMITS.max_workers):
            lease = join(directory, "ann", lease_s=1.0)
            directory.report_generation(lease.epoch, 1, 1)
            bench.advance(1.1)
        join(directory, "ann")
        assert directory.generation().adopted == {"ann": 0}


class TestLeases:
    def test_epochs_grow_for_a_worker_and_are_shared_by_none(self, directory: Directory) -> None:
        epochs = [join(directory, name).epoch for name in "abacba"]
        assert epochs == sorted(set(epochs))
        assert epochs[0] > NO_EPOCH

    def test_a_floor_is_overtaken_by_epochs_and_tokens(self, directory: Directory) -> None:
        floor = join(directory, "ann").epoch + 1_000_000
        lease = directory.register(Worker("ann"), LEASE_S, floor)
        assert lease.epoch > floor
        assert claim(directory, lease, A)[0].token > floor

    def test_workers_returns_the_live_ones_with_all_fields(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        first = Worker("ann", bytes(range(256)) * 20, "nfs:/kv")
        lease = directory.register(first, LEASE_S)
        other = directory.register(Worker("bob"), 2 * LEASE_S)
        assert directory.workers() == {lease.epoch: first, other.epoch: Worker("bob")}
        bench.advance(LEASE_S + 0.1)
        assert directory.workers() == {other.epoch: Worker("bob")}

    def test_a_lease_renewed_in_time_continues(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        for _ in range(5):
            bench.advance(0.9 * LEASE_S)
            directory.renew_lease(ann.epoch)
        assert ann.epoch in directory.workers()

    def test_a_lease_renewed_too_late_has_ended_for_good(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        bench.advance(LEASE_S + 0.1)
        for _ in range(2):
            with pytest.raises(StaleEpochError, match="register"):
                directory.renew_lease(ann.epoch)
        assert directory.workers() == {}

    def test_a_clock_set_back_neither_revives_nor_prolongs(
        self, directory: Directory, bench: DirectoryBench, ann: Lease, bob: Lease
    ) -> None:
        claim(directory, bob, B)
        bench.advance(LEASE_S / 2)
        directory.renew_lease(bob.epoch)
        bench.advance(LEASE_S / 2 + 0.1)
        with pytest.raises(StaleEpochError):
            directory.renew_lease(ann.epoch)
        bench.advance(-100 * LEASE_S)
        with pytest.raises(StaleEpochError):
            directory.renew_lease(ann.epoch)
        cid = join(directory, "cid")
        assert claim(directory, cid, B)[0].outcome is GrantOutcome.FOREIGN
        bench.advance(LEASE_S + 0.1)
        dan = join(directory, "dan")
        assert claim(directory, dan, B)[0].outcome is GrantOutcome.OWNED

    def test_after_a_new_registration_the_earlier_epoch_may_change_nothing(
        self, directory: Directory, ann: Lease
    ) -> None:
        claim(directory, ann, A)
        again = join(directory, "ann")
        with pytest.raises(RetiredEpochError, match="again"):
            directory.renew_lease(ann.epoch)
        assert set(directory.workers()) == {again.epoch}
        assert owner_of(directory, A) == ann.epoch

    def test_a_retired_epochs_artifacts_are_free_when_its_lease_would_have_ended(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        """Its process may not know yet that its epoch was retired."""
        token = claim(directory, ann, A)[0].token
        bench.advance(LEASE_S / 2)
        again = join(directory, "ann")
        assert claim(directory, again, A) == [Grant(GrantOutcome.FOREIGN, ann.epoch, token)]
        assert directory.lookup([A.chunk]).status(ann.epoch) is EpochStatus.RETIRED
        bench.advance(LEASE_S / 2 + 0.1)
        assert claim(directory, again, A)[0].outcome is GrantOutcome.OWNED

    def test_an_ended_lease_frees_at_once(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        claim(directory, ann, A)
        directory.end_lease(ann.epoch)
        directory.end_lease(ann.epoch)
        directory.end_lease(Epoch(ann.epoch + 1_000_000))
        with pytest.raises(StaleEpochError):
            directory.renew_lease(ann.epoch)
        assert claim(directory, bob, A)[0].outcome is GrantOutcome.OWNED

    @pytest.mark.parametrize("epoch", [NO_EPOCH, -1, 10**15])
    def test_an_epoch_that_never_was_is_stale(self, directory: Directory, epoch: int) -> None:
        with pytest.raises(StaleEpochError, match=str(epoch)):
            directory.renew_lease(Epoch(epoch))

    @pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
    def test_a_lease_of_no_length_is_refused(self, directory: Directory, lease_s: float) -> None:
        with pytest.raises(ValueError, match="lease_s"):
            directory.register(Worker("ann"), lease_s)

    @pytest.mark.parametrize(
        "worker",
        [
            Worker(""),
            Worker("x" * 257),
            Worker("a", bytes(2**20 + 1)),
            Worker("a", b"", "x" * 1025),
        ],
        ids=["no name", "long name", "much metadata", "long storage"],
    )
    def test_a_worker_that_fits_no_record_is_refused(
        self, directory: Directory, worker: Worker
    ) -> None:
        with pytest.raises(ValueError, match="bytes"):
            directory.register(worker, LEASE_S)

    def test_ended_epochs_make_room_for_new_ones_and_live_ones_do_not(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        for index in range(3 * LIMITS.max_workers):
            directory.end_lease(join(directory, f"w{index}").epoch)
        leases = [join(directory, f"live{i}") for i in range(LIMITS.max_workers)]
        with pytest.raises(DirectoryError, match="max_workers"):
            join(directory, "one more")
        assert set(directory.workers()) == {x.epoch for x in leases}
        bench.advance(LEASE_S + 0.1)
        join(directory, "one more")


class TestStaleEpochs:
    @pytest.mark.parametrize("how", ["ended", "expired", "retired", "unknown"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda d, e: d.renew_lease(e),
            lambda d, e: d.claim_owner(e, [claim_of(A), claim_of(B)]),
            lambda d, e: d.claim_owner(e, []),
            lambda d, e: d.release(e, {A: Token(2), B: NO_TOKEN}),
            lambda d, e: d.replicate_readonly(e, [claim_of(B)], 5.0),
            lambda d, e: d.add_chain_user(e, "r", [A.chunk]),
            lambda d, e: d.remove_chain_user(e, "r", [A.chunk]),
        ],
        ids=[
            "renew", "claim", "claim nothing", "release", "replicate", "add_chain_user",
            "remove_chain_user",
        ],
    )  # fmt: skip
    def test_changes_nothing(
        self,
        directory: Directory,
        bench: DirectoryBench,
        how: str,
        change: Callable[[Directory, Epoch], object],
    ) -> None:
        ann = join(directory, "ann", lease_s=LEASE_S)
        bob = join(directory, "bob", lease_s=10 * LEASE_S)
        claim(directory, ann, A)
        claim(directory, bob, B)
        directory.add_chain_user(bob.epoch, "r", [A.chunk])
        epoch = ann.epoch
        if how == "ended":
            directory.end_lease(epoch)
        elif how == "expired":
            bench.advance(LEASE_S + 0.1)
        elif how == "retired":
            join(directory, "ann")
        else:
            epoch = Epoch(epoch + 1_000_000)
        before = everything(directory)
        with pytest.raises(StaleEpochError):
            change(directory, epoch)
        assert everything(directory) == before


class TestOwnership:
    def test_the_first_to_claim_owns_and_keeps_its_token(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        [first] = claim(directory, ann, A)
        assert first == owned(ann, first.token)
        assert first.token > NO_TOKEN
        assert claim(directory, ann, A) == [first]
        assert claim(directory, bob, A) == [Grant(GrantOutcome.FOREIGN, ann.epoch, first.token)]

    def test_each_item_of_a_batch_is_decided_by_itself(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        window = ArtifactId(A.chunk, WINDOW)
        [a] = claim(directory, ann, A)
        grants = claim(directory, bob, A, window, B, B)
        outcomes = [g.outcome for g in grants]
        assert outcomes == [
            GrantOutcome.FOREIGN,
            GrantOutcome.OWNED,
            GrantOutcome.OWNED,
            GrantOutcome.OWNED,
        ]
        assert grants[2] == grants[3]
        view = directory.lookup([A.chunk, B.chunk])
        assert {s: h.owner for s, h in view.chunks[0].items()} == {
            KV: ann.epoch,
            WINDOW: bob.epoch,
        }
        assert view.chunks[0][KV].token == a.token

    def test_a_lookup_returns_missing_chunks_and_every_field(
        self, directory: Directory, ann: Lease
    ) -> None:
        keys = chain("long", 300)
        wanted = {0: copy_of(A, 0), 7: copy_of(A, 2**40, True), 299: Copy(2**33, bytes(16), -1)}
        claims = [Claim(ArtifactId(keys[i], KV), copy) for i, copy in wanted.items()]
        tokens = [g.token for g in directory.claim_owner(ann.epoch, claims)]
        view = directory.lookup(keys)
        assert len(view.chunks) == 300
        found = {i: chunk[KV] for i, chunk in enumerate(view.chunks) if chunk}
        assert {i: h.copy for i, h in found.items()} == wanted
        assert [h.token for h in found.values()] == tokens
        assert copies_at(view, 7) == [(ann.epoch, tokens[1], wanted[7])]
        assert copies_at(view, 7, WINDOW) == copies_at(view, 8) == []
        assert view.workers[ann.epoch] == ("ann", "", EpochStatus.LIVE)

    def test_an_empty_lookup(self, directory: Directory) -> None:
        assert len(directory.lookup([]).chunks) == 0

    def test_a_repeated_claim_moves_the_copy(self, directory: Directory, ann: Lease) -> None:
        [grant] = claim(directory, ann, A)
        moved = claim_of(A, 8192, on_ssd=True)
        assert directory.claim_owner(ann.epoch, [moved]) == [grant]
        assert directory.lookup([A.chunk]).chunks[0][KV].copy == moved.copy

    def test_a_released_artifact_is_free_and_its_next_token_greater(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        [grant] = claim(directory, ann, A)
        directory.release(ann.epoch, {A: grant.token})
        directory.release(ann.epoch, {A: grant.token, B: grant.token})
        assert copies_at(directory.lookup([A.chunk])) == []
        [later] = claim(directory, bob, A)
        assert later == owned(bob, later.token)
        assert later.token > grant.token

    def test_a_late_release_does_not_undo_a_newer_claim(
        self, directory: Directory, ann: Lease
    ) -> None:
        [first] = claim(directory, ann, A)
        directory.release(ann.epoch, {A: first.token})
        [second] = claim(directory, ann, A)
        assert second.token > first.token
        directory.release(ann.epoch, {A: first.token})
        assert owner_of(directory, A) == ann.epoch

    def test_no_worker_releases_for_another(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        [grant] = claim(directory, ann, A)
        directory.release(bob.epoch, {A: grant.token})
        assert owner_of(directory, A) == ann.epoch

    @pytest.mark.parametrize("ended", ["expired", "left"])
    def test_a_dead_owner_is_taken_over_with_a_greater_token(
        self, directory: Directory, bench: DirectoryBench, ann: Lease, ended: str
    ) -> None:
        [grant] = claim(directory, ann, A)
        if ended == "left":
            directory.end_lease(ann.epoch)
        else:
            bench.advance(LEASE_S + 0.1)
        assert copies_at(directory.lookup([A.chunk])) == []
        bob = join(directory, "bob")
        [taken] = directory.claim_owner(bob.epoch, [claim_of(A, 0)])
        assert taken == owned(bob, taken.token)
        assert taken.token > grant.token
        assert copies_at(directory.lookup([A.chunk])) == [(bob.epoch, taken.token, copy_of(A, 0))]

    def test_a_dead_owners_shared_ssd_can_be_adopted(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        ann = join(directory, "ann", storage="nfs:/kv/ann")
        directory.claim_owner(ann.epoch, [claim_of(A, on_ssd=True), claim_of(B)])
        view = directory.lookup([A.chunk])
        assert view.adoptable_in(view.chunks[0][KV]) == ""
        bench.advance(LEASE_S + 0.1)
        view = directory.lookup([A.chunk, B.chunk])
        assert [view.adoptable_in(x[KV]) for x in view.chunks] == ["nfs:/kv/ann", ""]

    @pytest.mark.parametrize(
        "copy",
        [Copy(0, bytes(16)), Copy(-5, bytes(16)), Copy(5, b""), Copy(5, bytes(17))],
        ids=repr,
    )
    def test_a_copy_that_no_reader_could_verify_is_refused(
        self, directory: Directory, ann: Lease, copy: Copy
    ) -> None:
        with pytest.raises(ValueError, match="checksum"):
            directory.claim_owner(ann.epoch, [claim_of(B), Claim(A, copy)])
        with pytest.raises(ValueError, match="checksum"):
            directory.replicate_readonly(ann.epoch, [Claim(A, copy)], 5.0)
        assert owner_of(directory, B) == NO_EPOCH

    @pytest.mark.parametrize("size", [0, 15, 17])
    def test_a_key_of_the_wrong_length_is_refused(
        self, directory: Directory, ann: Lease, size: int
    ) -> None:
        key = ChunkKey(bytes(size))
        for wrong in (
            Claim(ArtifactId(key, KV), copy_of(A)),
            Claim(A, copy_of(A), parent=key),
        ):
            with pytest.raises(ValueError, match="chunk key"):
                directory.claim_owner(ann.epoch, [wrong])

    def test_a_chain_is_claimed_in_any_order_and_with_branches(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        """The parent is a hint: every chunk is found with its owner, whatever the hint."""
        trunk, branch = chain("trunk", 12), chain("branch", 6)
        parents = dict(zip(trunk[1:], trunk, strict=False))
        parents |= dict(zip(branch, [trunk[5], *branch], strict=False))
        order = sorted([*trunk, *branch])
        owners = {key: (ann, bob)[i % 2] for i, key in enumerate(order)}
        for key, lease in owners.items():
            what = ArtifactId(key, KV)
            made = Claim(what, copy_of(what), parents.get(key, ROOT))
            [grant] = directory.claim_owner(lease.epoch, [made])
            assert grant.outcome is GrantOutcome.OWNED
        for path in (trunk, [*trunk[:6], *branch], branch, trunk[::-1]):
            found = [c[KV] for c in directory.lookup(path).chunks]
            assert [h.owner for h in found] == [owners[key].epoch for key in path]
            assert [h.copy for h in found] == [copy_of(ArtifactId(k, KV)) for k in path]
        middle = ArtifactId(trunk[4], KV)
        token = directory.lookup([trunk[4]]).chunks[0][KV].token
        directory.release(owners[trunk[4]].epoch, {middle: token})
        left = [bool(c) for c in directory.lookup(trunk).chunks]
        assert left == [key != trunk[4] for key in trunk]

    def test_a_full_directory_takes_no_new_record_and_keeps_the_old_ones(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        many = [ArtifactId(key, KV) for key in chain("many", LIMITS.max_artifacts)]
        grants = claim(directory, ann, *many, A)
        assert {g.outcome for g in grants[:-1]} == {GrantOutcome.OWNED}
        assert grants[-1] == Grant(GrantOutcome.FULL, NO_EPOCH, NO_TOKEN)
        assert claim(directory, ann, *many) == grants[:-1]
        directory.release(ann.epoch, {many[3]: grants[3].token})
        assert claim(directory, bob, A)[0].outcome is GrantOutcome.OWNED
        assert claim(directory, ann, many[3])[0].outcome is GrantOutcome.FULL

    def test_two_clients_see_the_same(self, bench: DirectoryBench) -> None:
        one, two = bench.open(), bench.open()
        ann, bob = join(one, "ann"), join(two, "bob")
        claim(one, ann, A)
        assert claim(two, bob, A)[0].outcome is GrantOutcome.FOREIGN
        assert set(one.workers()) == set(two.workers()) == {ann.epoch, bob.epoch}
        two.close()
        two.close()
        assert owner_of(one, A) == ann.epoch
        one.close()


def replicate(
    directory: Directory, lease: Lease, *what: ArtifactId, ttl_s: float = 5.0
) -> list[GrantOutcome]:
    copies = [claim_of(a, 512) for a in what]
    return [g.outcome for g in directory.replicate_readonly(lease.epoch, copies, ttl_s)]


class TestReplicas:
    def test_a_replica_is_listed_after_the_owner_until_it_runs_out(
        self, directory: Directory, bench: DirectoryBench, ann: Lease, bob: Lease
    ) -> None:
        [grant] = claim(directory, ann, A)
        [listed] = directory.replicate_readonly(bob.epoch, [claim_of(A, 512)], 5.0)
        assert listed == Grant(GrantOutcome.REPLICA, ann.epoch, grant.token)
        copies = copies_at(directory.lookup([A.chunk]))
        assert copies == [
            (ann.epoch, grant.token, copy_of(A)),
            (bob.epoch, grant.token, copy_of(A, 512)),
        ]
        bench.advance(5.1)
        assert copies_at(directory.lookup([A.chunk])) == copies[:1]

    def test_a_replica_listed_again_is_refreshed_and_listed_once(
        self, directory: Directory, bench: DirectoryBench, ann: Lease, bob: Lease
    ) -> None:
        claim(directory, ann, A)
        for _ in range(3):
            replicate(directory, bob, A)
            bench.advance(2.0)
        holders = [c.holder for c in copies_at(directory.lookup([A.chunk]))]
        assert holders == [ann.epoch, bob.epoch]

    def test_no_replica_without_a_record_or_of_ones_own_artifact(
        self, directory: Directory, ann: Lease
    ) -> None:
        claim(directory, ann, A)
        assert replicate(directory, ann, A, B) == [GrantOutcome.OWNED, GrantOutcome.ABSENT]
        assert len(copies_at(directory.lookup([A.chunk]))) == 1
        assert owner_of(directory, B) == NO_EPOCH

    def test_the_number_of_replicas_is_bounded(
        self, directory: Directory, bench: DirectoryBench, ann: Lease
    ) -> None:
        claim(directory, ann, A)
        others = [join(directory, f"w{i}") for i in range(LIMITS.max_replicas + 1)]
        outcomes = [replicate(directory, x, A) for x in others]
        assert outcomes == [[GrantOutcome.REPLICA]] * LIMITS.max_replicas + [[GrantOutcome.FULL]]
        assert replicate(directory, others[0], A) == [GrantOutcome.REPLICA]
        bench.advance(5.1)
        assert replicate(directory, others[-1], A) == [GrantOutcome.REPLICA]

    def test_only_its_holder_drops_a_replica(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        claim(directory, ann, A)
        replicate(directory, bob, A)
        directory.release(ann.epoch, {A: NO_TOKEN})
        assert len(copies_at(directory.lookup([A.chunk]))) == 2
        directory.release(bob.epoch, {A: NO_TOKEN})
        assert len(copies_at(directory.lookup([A.chunk]))) == 1

    def test_a_replicas_holder_is_not_the_owner_while_the_owner_lives(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        [grant] = claim(directory, ann, A)
        replicate(directory, bob, A)
        assert claim(directory, bob, A) == [Grant(GrantOutcome.FOREIGN, ann.epoch, grant.token)]

    @pytest.mark.parametrize("how", ["ended", "released"])
    def test_a_replicas_holder_takes_over_when_the_owner_has_ended_or_released(
        self, directory: Directory, how: str, ann: Lease, bob: Lease
    ) -> None:
        cid = join(directory, "cid")
        [grant] = claim(directory, ann, A)
        replicate(directory, bob, A)
        replicate(directory, cid, A)
        if how == "ended":
            directory.end_lease(ann.epoch)
        else:
            directory.release(ann.epoch, {A: grant.token})
        [taken] = claim(directory, bob, A)
        assert taken == owned(bob, taken.token)
        assert taken.token > grant.token
        assert claim(directory, bob, A) == [taken]
        assert claim(directory, cid, A) == [Grant(GrantOutcome.FOREIGN, bob.epoch, taken.token)]
        assert copies_at(directory.lookup([A.chunk])) == [
            (bob.epoch, taken.token, copy_of(A)),
            (cid.epoch, taken.token, copy_of(A, 512)),
        ]

    def test_a_claim_takes_the_place_of_the_claimants_replica(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        claim(directory, ann, A)
        replicate(directory, bob, A)
        directory.end_lease(ann.epoch)
        [taken] = claim(directory, bob, A)
        assert copies_at(directory.lookup([A.chunk])) == [(bob.epoch, taken.token, copy_of(A))]

    def test_a_dead_workers_replica_is_not_read(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        claim(directory, ann, A)
        replicate(directory, bob, A)
        directory.end_lease(bob.epoch)
        assert [c.holder for c in copies_at(directory.lookup([A.chunk]))] == [ann.epoch]

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_ttl_of_no_length_is_refused(
        self, directory: Directory, ann: Lease, ttl_s: float
    ) -> None:
        with pytest.raises(ValueError, match="ttl_s"):
            directory.replicate_readonly(ann.epoch, [claim_of(A)], ttl_s)


class TestSweep:
    def test_orphans_go_after_their_time_and_nothing_else(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        ann, bob = join(directory, "ann"), join(directory, "bob", lease_s=1_000.0)
        claim(directory, ann, A, *(ArtifactId(key, KV) for key in chain("x", 20)))
        claim(directory, bob, B)
        bench.advance(LEASE_S + LIMITS.orphan_ttl_s - 0.1)
        directory.renew_lease(bob.epoch)
        assert directory.sweep(1_000) == 0
        bench.advance(0.2)
        assert sum(directory.sweep(100) for _ in range(10)) == 21
        assert owner_of(directory, A) == NO_EPOCH
        assert owner_of(directory, B) == bob.epoch
        room = [ArtifactId(key, KV) for key in chain("room", LIMITS.max_artifacts)]
        outcomes = [g.outcome for g in claim(directory, bob, *room)]
        assert outcomes == [GrantOutcome.OWNED] * (LIMITS.max_artifacts - 1) + [GrantOutcome.FULL]

    def test_an_orphan_with_a_live_replica_stays(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        ann, bob = join(directory, "ann"), join(directory, "bob", lease_s=1_000.0)
        claim(directory, ann, A)
        replicate(directory, bob, A, ttl_s=500.0)
        bench.advance(LEASE_S + LIMITS.orphan_ttl_s + 0.1)
        assert directory.sweep(1_000) == 0
        [taken] = claim(directory, bob, A)
        assert taken.outcome is GrantOutcome.OWNED


class TestChainUsers:
    def test_the_last_user_to_leave_makes_a_chain_evictable(
        self, directory: Directory, ann: Lease, bob: Lease
    ) -> None:
        directory.add_chain_user(ann.epoch, "s1", [A.chunk, B.chunk])
        directory.add_chain_user(ann.epoch, "s1", [A.chunk])
        directory.add_chain_user(bob.epoch, "s1", [A.chunk])
        assert directory.count_users([A.chunk, B.chunk]) == [2, 1]
        assert directory.remove_chain_user(ann.epoch, "s1", [A.chunk, B.chunk]) == [B.chunk]
        assert directory.remove_chain_user(ann.epoch, "s1", [A.chunk]) == []
        assert directory.remove_chain_user(bob.epoch, "s1", [A.chunk]) == [A.chunk]
        assert directory.remove_chain_user(bob.epoch, "s1", [A.chunk]) == [A.chunk]

    def test_users_of_an_ended_worker_do_not_count(
        self, directory: Directory, bench: DirectoryBench
    ) -> None:
        ann, bob = join(directory, "ann"), join(directory, "bob", lease_s=1_000.0)
        directory.add_chain_user(ann.epoch, "s1", [A.chunk])
        directory.add_chain_user(bob.epoch, "s2", [A.chunk])
        bench.advance(LEASE_S + 0.1)
        assert directory.count_users([A.chunk])[0] == 1
        assert directory.remove_chain_user(bob.epoch, "s2", [A.chunk]) == [A.chunk]

    def test_users_beyond_the_limit_are_not_counted(self, directory: Directory, ann: Lease) -> None:
        for index in range(LIMITS.max_users + 2):
            directory.add_chain_user(ann.epoch, f"s{index}", [A.chunk])
        assert directory.count_users([A.chunk])[0] == LIMITS.max_users

    @pytest.mark.parametrize("user", ["", "x" * 257])
    def test_a_bad_name_is_refused(self, directory: Directory, ann: Lease, user: str) -> None:
        with pytest.raises(ValueError, match="user"):
            directory.add_chain_user(ann.epoch, user, [A.chunk])
