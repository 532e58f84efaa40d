"""The parameters of a request: `kv_transfer_params`, read and checked in one place.

Clients are not trusted, and a wrong parameter costs no request: it is ignored, with one warning for
each name. `max_load_tokens`, `max_offload_tokens` and `kv_load_tiers` are vLLM's own and mean what
they mean to its offloading connector. Ours are in the object `heterocache`; `session_id` and
`expected_back_s` are also read outside it. Other fields may be another connector's. Those of a
handoff are read by `handoff`, and `report` by `request_report`.
"""

from __future__ import annotations

import difflib
import logging
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from hetero_connector.containers import BoundedDict
from hetero_connector.engine.scheduler import handoff
from hetero_connector.engine.scheduler.request_report import NAMESPACE, REPORT

logger = logging.getLogger("vllm.heterocache")

MAX_BACK_S = 30 * 86_400.0
"""Longest time in which a session may be expected back, in seconds."""
MAX_TTL_S = 30 * 86_400.0
MAX_PIN_S = 86_400.0
_MAX_NAMES = 16
"""Unknown names of one request that are looked at."""
_MAX_WARNINGS = 100
_MAX_SHOWN = 80
_NEAR = 0.8
"""Share of equal characters from which on a name is taken for a misspelt one."""


class Priority(StrEnum):
    """The order in which the state of a request leaves a full tier."""

    LOW = "low"
    """First: before the state of other requests, until it is used again."""
    NORMAL = "normal"
    HIGH = "high"
    """Last, for an hour."""


class LoadTiers(NamedTuple):
    """The tiers besides DRAM that a request may load from."""

    ssd: bool = True
    peers: bool = True


ALL_TIERS, DRAM_ALONE = LoadTiers(), LoadTiers(ssd=False, peers=False)


@dataclass(frozen=True)
class RequestParams:
    """The parameters of one request, each valid or not given."""

    max_load_tokens: int | None = None
    """Most tokens to restore beyond those in the engine's own cache."""
    max_offload_tokens: int | None = None
    """Tokens from the beginning beyond which nothing is stored."""
    kv_load_tiers: LoadTiers = ALL_TIERS
    session_id: str | None = None
    expected_back_s: float | None = None
    """Seconds from the end of the answer to the session's next request."""
    fork: str | None = None
    """The session whose prompt this one continues, by id."""
    end_session: bool = False
    no_store: bool = False
    ttl_s: float | None = None
    pin_s: float | None = None
    priority: Priority = Priority.NORMAL

    @property
    def stores_nothing(self) -> bool:
        """Return whether nothing of the request is stored."""
        return self.no_store or self.max_offload_tokens == 0

    @property
    def limits_life(self) -> bool:
        """Return whether what only this request stores is to leave early."""
        return self.ttl_s is not None or self.priority is Priority.LOW


PLAIN = RequestParams()


def _count(value: object) -> int:
    if type(value) is int and value >= 0:
        return value
    raise ValueError("a whole number of tokens, at least 0")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def _name(value: object) -> str | None:
    if isinstance(value, str):
        return value or None
    raise ValueError("a text")


def _seconds(most: float) -> Callable[[object], float]:
    def seconds(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            value = math.nan
        if 0 <= value <= most:
            return float(value)
        raise ValueError(f"seconds from 0 to {most:.0f}")

    return seconds


def _priority(value: object) -> Priority:
    if isinstance(value, str) and value in set(Priority):
        return Priority(value)
    raise ValueError("one of " + ", ".join(repr(str(x)) for x in Priority))


_MEDIA, _LOCALITIES = ("CPU", "STORAGE"), ("LOCAL", "REMOTE")


def _load_tiers(value: object) -> LoadTiers:
    """Return the tiers that any of the entries names; a wrong entry names none.

    Without a single right one that is all of them, but an empty list is none.
    """
    if not isinstance(value, list):
        raise ValueError(_TIERS)
    places = [place for entry in islice(value, 64) if (place := _place(entry)) is not None]
    if value and not places:
        raise ValueError(_TIERS)
    return LoadTiers(
        ssd=any(medium != "CPU" and locality != "REMOTE" for medium, locality in places),
        peers=any(locality != "LOCAL" for _, locality in places),
    )


_TIERS = (
    'a list of objects such as {"medium": "STORAGE", "locality": "LOCAL"}, with a medium of CPU or '
    "STORAGE and a locality of LOCAL or REMOTE; what is left out is any"
)


def _place(entry: object) -> tuple[str | None, str | None] | None:
    if not isinstance(entry, dict):
        return None
    medium, locality = entry.get("medium"), entry.get("locality")
    for given, known in ((medium, _MEDIA), (locality, _LOCALITIES)):
        if given is not None and not (isinstance(given, str) and given.upper() in known):
            return None
    return medium and medium.upper(), locality and locality.upper()


VLLM_FIELDS: Mapping[str, Callable[[object], object]] = {
    "max_load_tokens": _count,
    "max_offload_tokens": _count,
    "kv_load_tiers": _load_tiers,
}
SESSION_FIELDS: Mapping[str, Callable[[object], object]] = {
    "session_id": _name,
    "expected_back_s": _seconds(MAX_BACK_S),
}
OWN_FIELDS: Mapping[str, Callable[[object], object]] = {
    **SESSION_FIELDS,
    "fork": _name,
    "end_session": _flag,
    "no_store": _flag,
    "ttl_s": _seconds(MAX_TTL_S),
    "pin_s": _seconds(MAX_PIN_S),
    "priority": _priority,
}
assert {*VLLM_FIELDS, *OWN_FIELDS} == {x.name for x in fields(RequestParams)}
_OUTSIDE = frozenset({*VLLM_FIELDS, *SESSION_FIELDS, *handoff.FIELDS, NAMESPACE})
"""Names that are known directly in `kv_transfer_params`."""
_INSIDE = frozenset({*OWN_FIELDS, REPORT})


class ParamsReader:
    """Reads the parameters of requests, and warns of wrong ones: of each name once.

    Names and warnings that were met are remembered in bounded number, so no client can fill the log
    or cost the engine's time.
    """

    def __init__(self) -> None:
        self.warned: set[str] = set()
        """Names of which a warning was logged."""
        self._met = BoundedDict[tuple[str, bool], None](4_096)
        """Unknown names that were looked at, each with whether it was in our own object."""

    def read(self, params: object, request_id: str) -> RequestParams:
        """Return what is right of `kv_transfer_params`. Never raises."""
        if not params:
            return PLAIN
        if not isinstance(params, dict):
            self._warn("kv_transfer_params", request_id, "expected an object")
            return PLAIN
        own = params.get(NAMESPACE, {})
        if not isinstance(own, dict):
            self._warn(NAMESPACE, request_id, f"expected an object, got {_shown(own)}")
            own = {}
        values = {
            **self._take(params, VLLM_FIELDS, request_id),
            **self._take(params, SESSION_FIELDS, request_id),
            **self._take(own, OWN_FIELDS, request_id),
        }
        self._look_for_unknown(params, own, request_id)
        return RequestParams(**values) if values else PLAIN

    def warn_refused(self, name: str, request_id: str, reason: str) -> None:
        """Warn of a parameter that is right but cannot be obeyed."""
        self._warn(f"{name}: {reason}", request_id, "it is ignored")

    def _take(
        self,
        params: Mapping[str, object],
        known: Mapping[str, Callable[[object], object]],
        request_id: str,
    ) -> dict[str, Any]:
        taken = {}
        for name, check in known.items():
            if (value := params.get(name)) is None:
                continue
            try:
                taken[name] = check(value)
            except ValueError as error:
                self._warn(name, request_id, f"expected {error}; got {_shown(value)}")
        return taken

    def _look_for_unknown(
        self, params: Mapping[str, object], own: Mapping[str, object], request_id: str
    ) -> None:
        if len(self.warned) >= _MAX_WARNINGS:
            return
        outside = ((name, False) for name in params if name not in _OUTSIDE)
        inside = ((name, True) for name in own if name not in _INSIDE)
        for name, is_own in (*islice(outside, _MAX_NAMES), *islice(inside, _MAX_NAMES)):
            shown = str(name)[:_MAX_SHOWN]
            if (shown, is_own) not in self._met:
                self._met[shown, is_own] = None
                if problem := misspelt(shown, is_own=is_own):
                    self._warn(shown, request_id, problem)

    def _warn(self, name: str, request_id: str, problem: str) -> None:
        if name in self.warned or len(self.warned) >= _MAX_WARNINGS:
            return
        self.warned.add(name)
        logger.warning("kv_transfer_params of request %s: %s: %s", request_id, name, problem)
        if len(self.warned) == _MAX_WARNINGS:
            logger.warning("further wrong kv_transfer_params are not logged")


def misspelt(name: str, *, is_own: bool) -> str:
    """Return what is wrong with an unknown name; "" for one that may be another connector's.

    `is_own`: it is in the object `heterocache`, where all names are ours.
    """
    if not is_own and name in _INSIDE:
        return f'it belongs into {{"{NAMESPACE}": {{...}}}}; here it is ignored'
    near = difflib.get_close_matches(name, _INSIDE if is_own else _OUTSIDE | _INSIDE, 1, _NEAR)
    if near:
        return f"it is unknown; did you mean {near[0]!r}?"
    if is_own and name in _OUTSIDE:
        return f'it is unknown inside "{NAMESPACE}"; write it next to that'
    return f"it is unknown inside {NAMESPACE!r}" if is_own else ""


def _shown(value: object) -> str:
    """Return a short text for any value, also one of a client that wants to cost time."""
    try:
        if isinstance(value, int) and abs(value) >= 1 << 64:
            return "a huge number"
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return reprlib.repr(value)[:_MAX_SHOWN]
    except (ValueError, RecursionError):  # of numbers with thousands of digits inside
        return f"a {type(value).__name__}"
