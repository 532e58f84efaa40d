"""Expected returns come out when they are due, each at most once, against a plain model."""

import math

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ROOT
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, PrefetchSchedule

SESSIONS = st.integers(0, 6)
TIMES_S = st.integers(0, 20).map(float)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("expect"), SESSIONS, TIMES_S, TIMES_S),
        st.tuples(st.just("cancel"), SESSIONS),
        st.tuples(st.just("pass"), TIMES_S),
    ),
    max_size=80,
)


def expected(session: int, start_s: float, latest_s: float) -> ExpectedReturn:
    return ExpectedReturn(session, (ROOT,), start_s, latest_s, 0.5)


@given(STEPS, st.integers(1, 8))
def test_as_a_plain_model_says(steps: list[tuple[object, ...]], capacity: int) -> None:
    schedule, model = PrefetchSchedule(capacity), dict[object, ExpectedReturn]()
    now_s = 0.0
    for kind, *args in steps:
        if kind == "expect":
            one = expected(*args)  # type: ignore[arg-type]
            schedule.expect(one)
            model.pop(one.session, None)
            model[one.session] = one
            if len(model) > capacity:
                del model[next(iter(model))]
        elif kind == "cancel":
            schedule.cancel(args[0])  # type: ignore[arg-type]
            model.pop(args[0], None)
        else:
            now_s += args[0]  # type: ignore[operator]
            due = {s: x for s, x in model.items() if x.start_s <= now_s}
            taken = []
            while (one_due := schedule.take_due(now_s)) is not None:
                taken.append(one_due)
            assert [x.start_s for x in taken] == sorted(x.start_s for x in taken)
            assert {x.session for x in taken} == {s for s, x in due.items() if now_s < x.latest_s}
            for session in due:
                del model[session]
        assert len(schedule) == len(model) <= capacity
        assert schedule.next_s == min((x.start_s for x in model.values()), default=math.inf)


def test_what_was_replaced_is_not_kept_for_ever() -> None:
    schedule = PrefetchSchedule(capacity=4)
    for i in range(10_000):
        schedule.expect(expected(i % 4, 1.0 + i, 1e9))
    assert len(schedule._by_start) <= 80
    schedule.clear()
    assert schedule.take_due(1e9) is None
