"""Parameters of requests: right ones are taken, wrong ones are ignored with bounded warnings."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.engine.scheduler import request_params
from hetero_connector.engine.scheduler.request_params import (
    PLAIN,
    LoadTiers,
    ParamsReader,
    Priority,
    RequestParams,
)


class Lines(logging.Handler):
    """The lines of our log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    request_params.logger.addHandler(handler)
    yield handler.texts
    request_params.logger.removeHandler(handler)


def read(params: object) -> RequestParams:
    return ParamsReader().read(params, "r")


def own(**fields: Any) -> RequestParams:
    return read({"heterocache": fields})


def test_every_parameter_is_taken_and_nothing_is_logged(lines: list[str]) -> None:
    params = {
        "max_load_tokens": 512,
        "max_offload_tokens": 0,
        "kv_load_tiers": [{"medium": "storage", "locality": "LOCAL"}],
        "heterocache": {
            "session_id": "s",
            "expected_back_s": 12,
            "fork": "t",
            "end_session": True,
            "no_store": True,
            "ttl_s": 60,
            "pin_s": 0.5,
            "priority": "high",
            "report": True,
        },
        "do_remote_prefill": True,
        "remote_engine_id": "another connector's",
    }
    assert read(params) == RequestParams(
        512, 0, LoadTiers(ssd=True, peers=False), "s", 12.0, "t", True, True, 60.0, 0.5,
        Priority.HIGH,
    )  # fmt: skip
    assert lines == []


@pytest.mark.parametrize("params", [None, {}, [], "", {"session_id": ""}, {"heterocache": {}}])
def test_without_parameters_a_request_is_plain(params: object) -> None:
    assert read(params) == PLAIN


def test_session_fields_outside_are_read_and_those_inside_come_first() -> None:
    params = {"session_id": "a", "expected_back_s": 1, "heterocache": {"session_id": "b"}}
    assert read(params) == RequestParams(session_id="b", expected_back_s=1.0)


@pytest.mark.parametrize(
    ("value", "tiers"),
    [
        ([], (False, False)),
        ([{}], (True, True)),
        ([{"medium": "CPU"}], (False, True)),
        ([{"medium": "cpu", "locality": "local"}], (False, False)),
        ([{"medium": "Storage"}], (True, True)),
        ([{"locality": "REMOTE"}], (False, True)),
        ([{"locality": "LOCAL"}, "disk"], (True, False)),
        (["disk"], (True, True)),
        ([{"medium": "DISK"}], (True, True)),
        ({"medium": "CPU"}, (True, True)),
    ],
)
def test_load_tiers_mean_what_they_mean_to_vllm(value: object, tiers: tuple[bool, bool]) -> None:
    """A list names what is allowed; none of its entries right, or no list: all is."""
    assert read({"kv_load_tiers": value}).kv_load_tiers == LoadTiers(*tiers)


def test_load_tiers_are_parsed_as_vllm_does() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        _parse_tier_filter,
    )
    from vllm.v1.kv_offload.base import Locality, Medium

    entries: list[Any] = [{}, "x", {"medium": "tape"}]
    entries += [{"medium": m} for m in ("CPU", "storage")]
    entries += [{"medium": "STORAGE", "locality": x} for x in ("local", "REMOTE")]
    for value in [[], *([x] for x in entries), *([x, y] for x in entries for y in entries)]:
        theirs = _parse_tier_filter(value)
        ours = read({"kv_load_tiers": value}).kv_load_tiers
        remote = [theirs.allows(x, Locality.REMOTE) for x in (Medium.CPU, Medium.STORAGE)]
        assert ours == LoadTiers(theirs.allows(Medium.STORAGE, Locality.LOCAL), any(remote)), value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_load_tokens", -1),
        ("max_load_tokens", True),
        ("max_load_tokens", 1.0),
        ("max_offload_tokens", "7"),
        ("kv_load_tiers", "SSD"),
        ("session_id", 7),
        ("expected_back_s", True),
        ("expected_back_s", float("nan")),
        ("expected_back_s", 10**400),
        ("heterocache", [1]),
    ],
)
def test_a_wrong_value_outside_is_ignored_with_one_warning(
    name: str, value: object, lines: list[str]
) -> None:
    reader = ParamsReader()
    for number in range(3):
        assert reader.read({name: value}, f"r{number}") == PLAIN
    (line,) = lines
    assert "request r0" in line
    assert f"{name}: expected" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_store", 1),
        ("no_store", "true"),
        ("end_session", []),
        ("ttl_s", -1),
        ("ttl_s", float("inf")),
        ("ttl_s", 31 * 86_400),
        ("pin_s", "1h"),
        ("pin_s", 86_401),
        ("priority", "urgent"),
        ("priority", 1),
        ("priority", ["high"]),
        ("fork", {}),
        ("fork", [[10**5_000]]),
        pytest.param("ttl_s", 10**5_000, id="a huge number"),
    ],
)
def test_a_wrong_value_of_ours_is_ignored_with_one_warning(
    name: str, value: object, lines: list[str]
) -> None:
    assert own(**{name: value}) == PLAIN
    (line,) = lines
    assert f"{name}: expected" in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"expcted_back_s": 5}, "did you mean 'expected_back_s'?"),
        ({"no_store": True}, 'it belongs into {"heterocache": {...}}'),
        ({"heterocach": {"no_store": True}}, "did you mean 'heterocache'?"),
        ({"heterocache": {"nostore": True}}, "did you mean 'no_store'?"),
        ({"heterocache": {"max_load_tokens": 5}}, "write it next to that"),
        ({"heterocache": {"zzz": True}}, "it is unknown inside 'heterocache'"),
        ({"heterocache": {7: True}}, "it is unknown inside 'heterocache'"),
    ],
)
def test_an_unknown_name_is_logged_once(
    params: dict[str, Any], said: str, lines: list[str]
) -> None:
    reader = ParamsReader()
    for _ in range(3):
        assert reader.read(params, "r") == PLAIN
    (line,) = lines
    assert said in line


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_block_ids", "x", 7, "tp_size"])
def test_other_connectors_fields_are_left_to_them(name: Any, lines: list[str]) -> None:
    read({name: 1, "session_id": "s"})
    assert lines == []


def test_thousands_of_names_neither_fill_the_log_nor_take_long(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    look = request_params.misspelt
    monkeypatch.setattr(
        request_params,
        "misspelt",
        lambda name, *, is_own: looked_at.append(name) or look(name, is_own=is_own),
    )
    reader = ParamsReader()
    for number in range(200):
        names = {f"{number}_{i}" * 50: i for i in range(1_000)}
        assert reader.read({**names, "heterocache": names}, "r") == PLAIN
        assert len(looked_at) <= 32 * (number + 1)
    assert len(lines) <= 101
    assert "not logged" in lines[-1]
    assert max(map(len, lines)) < 300
    count = len(looked_at)
    reader.read({"heterocache": {"one more": 1}}, "r")
    assert len(looked_at) == count


def test_the_examples_of_the_guide_are_right(lines: list[str]) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/requests.md").read_text()
    examples = [json.loads(text) for text in re.findall(r"`({.*})`", guide)]
    assert len(examples) >= 9
    for params in examples:
        assert read(params) != PLAIN
    assert lines == []


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


keys = st.one_of(
    st.sampled_from(sorted({*request_params.OWN_FIELDS, *request_params.VLLM_FIELDS})),
    st.sampled_from(["heterocache", "medium", "locality", "do_remote_decode", "prefilled_tokens"]),
    st.text(max_size=20),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(),
    st.sampled_from([1 << 63, "high", "\ud800", "STORAGE"]),
    st.builds(lambda sign: sign * 10**5_000, st.sampled_from([1, -1])),
    st.builds(nested, st.sampled_from([1, 500, 5_000])),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=6)),
    max_leaves=12,
)
objects = st.dictionaries(keys, values, max_size=8)


def with_own(outside: dict[str, Any], inside: dict[str, Any]) -> dict[str, Any]:
    return {**outside, "heterocache": inside}


json_params = st.one_of(values, objects, st.builds(with_own, objects, objects))


@settings(max_examples=300, deadline=None)
@given(json_params)
def test_any_json_is_read_without_an_error_and_gives_only_valid_values(params: object) -> None:
    found = read(params)
    for tokens in (found.max_load_tokens, found.max_offload_tokens):
        assert tokens is None or tokens >= 0
    limits = [
        (found.expected_back_s, request_params.MAX_BACK_S),
        (found.ttl_s, request_params.MAX_TTL_S),
        (found.pin_s, request_params.MAX_PIN_S),
    ]
    for seconds, most in limits:
        assert seconds is None or 0 <= seconds <= most
    assert isinstance(found.priority, Priority)
    assert {type(found.no_store), type(found.end_session)} == {bool}
