"""One client's many keys drive out its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.store.catalog.fair_shares import FairShares

TENANTS = [bytes([number]) for number in range(15)]
"""More than some of the maps have room for."""


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(TENANTS)), max_size=80),
)
def test_who_leaves_is_the_oldest_of_one_who_has_more_than_its_share(
    capacity: int, added: list[tuple[int, bytes]]
) -> None:
    shares, model = FairShares(capacity), dict[object, bytes]()
    for key, tenant in added:
        model.pop(key, None)
        model[key] = tenant
        counts = {t: sum(x == t for x in model.values()) for t in model.values()}
        victim = shares.add(key, tenant)
        if len(model) <= capacity:
            assert victim is None
            continue
        assert victim != key, "the newcomer stays"
        whose = model[victim]
        assert counts[whose] * len(counts) >= capacity
        assert victim == next(k for k, t in model.items() if t == whose), "its oldest"
        if counts[tenant] * len(counts) <= capacity:
            assert whose != tenant, "a newcomer within its share drives out another's"
        del model[victim]
    assert len(shares) == len(model)


def test_with_one_tenant_the_oldest_leaves() -> None:
    shares = FairShares(3)
    assert [shares.add(key, b"") for key in range(5)] == [None, None, None, 0, 1]


def test_many_keys_of_one_client_leave_anothers_alone() -> None:
    shares = FairShares(100)
    for key in range(10):
        assert shares.add(("ann", key), b"ann") is None
    left = {shares.add(("eve", key), b"eve") for key in range(10_000)} - {None}
    assert {who for who, _ in left} == {"eve"}  # type: ignore[misc]
