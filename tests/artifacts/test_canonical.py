import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.canonical import encode
from hetero_connector.spec.state_types import StateType

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=3)
)


def typed(value: object) -> object:
    """A form whose equality tells 1 from True and from 1.0, and 0.0 from -0.0."""
    if isinstance(value, list):
        return ("list", *(typed(v) for v in value))
    if isinstance(value, dict):
        return ("dict", frozenset((k, typed(v)) for k, v in value.items()))
    return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(a: object, b: object) -> None:
    assert (encode(a) == encode(b)) == (typed(a) == typed(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (["ab", "c"], ["a", "bc"]),
        ([], None),
        ("", b""),
        (1, True),
        (1, "1"),
        ([["a"], "b"], [["a", "b"]]),
        ({"a": None}, {}),
    ],
)
def test_similar_values_have_different_bytes(a: object, b: object) -> None:
    assert encode(a) != encode(b)


def test_order_of_a_mapping_and_kind_of_a_sequence_do_not_matter() -> None:
    assert encode({"a": 1, "b": (1, 2)}) == encode({"b": [1, 2], "a": 1})
    assert encode(StateType.DENSE_KV) == encode("dense_kv")


@pytest.mark.parametrize("value", [object(), {1: "a"}, {"a", "b"}, [object()]])
def test_values_without_a_unique_encoding_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)
