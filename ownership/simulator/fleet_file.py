"""The fleet of a simulation, read from a YAML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hetero_connector.errors import ConfigError, SimulationError
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.profile import CostProfile
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.presets import PRESETS
from hetero_connector.units import GIB
from ownership.scheduling.fleet import Link, Role
from ownership.simulator.machine.costs import (
    COMPUTE,
    HARDWARE,
    derived_costs,
    page_bytes_of,
    roofline_of,
)
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.machine.roofline import Roofline
from ownership.simulator.machine.worker import WorkerSpec
from ownership.simulator.state.memory import TierBytes

_Count = Annotated[int, Meta(ge=1, le=100_000)]
_Size = Annotated[float, Meta(ge=0, le=1e9)]
_Above0 = Annotated[float, Meta(gt=0, le=1e9)]
_FIELD = re.compile(r" - at `\$\.?(?P<field>.*)`$")
_OF_A_ROUTER = {"Expected `object`, got `str`", "Object contains unknown field `url`"}
"""Problems of a worker in a router's configuration: a URL, or an object that has one."""


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    """A kind of worker: `count` of them, named `name-0`, `name-1`, ..."""

    hardware: str | None = None
    profile: str | None = None
    name: str = "worker"
    count: _Count = 1
    gpus: _Count = 1
    hbm_gib: _Above0 | None = None
    dram_gib: _Size = 0.0
    ssd_gib: _Size = 0.0
    role: Literal["both", "prefill", "decode"] = "both"


class _Link(msgspec.Struct, forbid_unknown_fields=True, rename={"source": "from", "target": "to"}):
    source: str
    target: str
    gbit_per_s: _Above0
    latency_us: _Size = 0.0


class _Fleet(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    workers: Annotated[list[_Worker], Meta(min_length=1)]
    links: list[_Link] = []
    chunk_tokens: _Count | None = None
    step_tokens: _Count = 8192
    max_running: _Count = 256
    retention_interval: Annotated[int, Meta(ge=0, le=1 << 30)] | None = 0


@dataclass(frozen=True)
class FleetSpec:
    """Workers of one model, all with the same tensor parallelism."""

    source: str
    model_name: str
    model: ModelSpec
    workers: tuple[WorkerSpec, ...]
    limits: EngineLimits
    links: Mapping[tuple[str, str], Link]
    chunk_tokens: int | None = None
    """None: the least that fits trace and model, see `chunk_tokens_for`."""
    profiles: tuple[Path, ...] = ()
    """The files of the profiles that were read."""

    def of_size(self, count: int) -> FleetSpec:
        """Return a fleet of `count` workers: the first ones, or more by repeating them in turn.

        Raises SimulationError if links name workers.
        """
        if count == len(self.workers):
            return self
        if self.links:
            problem = "a sweep over workers needs a fleet without links"
            raise SimulationError(self.source, problem)
        repeated = [self.workers[i % len(self.workers)] for i in range(count)]
        named = (replace(w, name=f"{w.name}.{i}") for i, w in enumerate(repeated))
        return replace(self, workers=tuple(named))


def read_fleet(path: Path) -> FleetSpec:
    """Read a fleet.

    Raises:
        SimulationError: the file cannot be read, is no YAML, or describes an impossible fleet;
            names file, and line or field.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SimulationError(str(path), error.strerror or str(error)) from error
    try:
        found = msgspec.yaml.decode(text, type=_Fleet)
    except msgspec.ValidationError as error:
        place = _FIELD.search(str(error))
        problem = str(error)[: place.start()] if place else str(error)
        field = place["field"] if place else None
        raise SimulationError(str(path), _in_words(problem, field), field) from error
    except msgspec.DecodeError as error:
        places = re.findall(r"line (\d+)", str(error))
        line = int(places[-1]) if places else None
        raise SimulationError(str(path), f"not YAML: {error}", line=line) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise SimulationError(str(path), f"not YAML: {error}") from error
    return _Reader(path, found).fleet()


def _in_words(problem: str, field: str | None) -> str:
    """Say what is wrong with a file's keys as the configuration does; other problems as they are.

    `field`: the place of the problem; None: the whole file.
    """
    if problem == "Expected `object`, got `null`" and field is None:
        return "the file is empty; docs/internals/simulator.md shows one"
    if found := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"the key {found[1]!r} is missing"
    is_worker = re.fullmatch(r"workers\[.*\]", field or "")
    if is_worker and problem in _OF_A_ROUTER:
        return (
            "this is a router's configuration, with the addresses of workers. A simulated fleet "
            "has a model, and the hardware or profile of its workers; docs/internals/simulator.md "
            "shows one"
        )
    if not (found := re.fullmatch(r"Object contains unknown field `(.*)`", problem)):
        return problem
    kinds: dict[str, type[msgspec.Struct]] = {"workers": _Worker, "links": _Link}
    kind = kinds.get((field or "").partition("[")[0], _Fleet)
    keys = [x.encode_name for x in msgspec.structs.fields(kind)]
    close = difflib.get_close_matches(found[1], keys, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(keys)}"
    return f"unknown key {found[1]!r}; {hint}"


class _Reader:
    """Makes the fleet that a file describes."""

    def __init__(self, path: Path, fleet: _Fleet) -> None:
        self._path, self._fleet = path, fleet
        self._profiles: list[Path] = []

    def fleet(self) -> FleetSpec:
        found = self._fleet
        if found.model not in PRESETS:
            raise self._error(f"no preset {found.model!r}; there are {', '.join(PRESETS)}", "model")
        sizes = {worker.gpus for worker in found.workers}
        if len(sizes) > 1:
            problem = f"workers of {sorted(sizes)} accelerators: state is laid out by their number"
            raise self._error(problem, "workers")
        model = PRESETS[found.model](tp_size=sizes.pop())
        if found.chunk_tokens is not None and found.chunk_tokens % model.alignment:
            problem = f"{found.chunk_tokens} is no multiple of the model's {model.alignment}"
            raise self._error(problem, "chunk_tokens")
        if found.step_tokens <= found.max_running:
            problem = (
                f"{found.step_tokens} leaves no token for a prefill next to {found.max_running}"
            )
            raise self._error(f"{problem} decodes (max_running)", "step_tokens")
        workers = tuple(self._workers(model))
        names = {worker.name for worker in workers}
        if len(names) < len(workers):
            raise self._error("two kinds of workers have the same name", "workers")
        return FleetSpec(
            str(self._path), found.model, model, workers,
            EngineLimits(found.step_tokens, found.max_running, found.retention_interval),
            dict(self._links(names)), found.chunk_tokens, tuple(self._profiles),
        )  # fmt: skip

    def _workers(self, model: ModelSpec) -> Iterator[WorkerSpec]:
        for at, kind in enumerate(self._fleet.workers):
            field = f"workers[{at}]"
            profile = self._profile(kind, field)
            costs, roofline = self._costs(kind, model, profile, field)
            measured = profile.model if profile else ""
            capacity = TierBytes(
                self._hbm_bytes(kind, field),
                int(kind.dram_gib * GIB),
                int(kind.ssd_gib * GIB),
            )
            if capacity.ssd and not capacity.dram:
                raise self._error("an SSD needs DRAM: reads pass through it", f"{field}.dram_gib")
            for number in range(kind.count):
                name = f"{kind.name}-{number}" if kind.count > 1 else kind.name
                yield WorkerSpec(name, costs, capacity, Role(kind.role), roofline, measured)

    def _costs(
        self, kind: _Worker, model: ModelSpec, profile: CostProfile | None, field: str
    ) -> tuple[CostModel, Roofline | None]:
        steps = self._fleet.step_tokens
        if profile is not None:
            return profile.cost_model(model.state_types, step_tokens=steps), None
        assert kind.hardware is not None
        if kind.hardware not in HARDWARE:
            problem = f"no {kind.hardware!r}; there are {', '.join(HARDWARE)}"
            raise self._error(problem, f"{field}.hardware")
        hardware = HARDWARE[kind.hardware]
        roofline = roofline_of(hardware, kind.gpus, model, COMPUTE[self._fleet.model])
        return derived_costs(hardware, kind.gpus, model, roofline, steps), roofline

    def _profile(self, kind: _Worker, field: str) -> CostProfile | None:
        """Read a worker's profile; None if it has hardware instead."""
        if (kind.hardware is None) == (kind.profile is None):
            raise self._error("needs either hardware or profile", field)
        if kind.profile is None:
            return None
        path = self._path.parent / kind.profile
        try:
            profile = CostProfile.read(path)
        except ConfigError as error:
            raise self._error(str(error), f"{field}.profile") from error
        if profile.subject.tp_size != kind.gpus:
            problem = f"was measured with tensor parallelism {profile.subject.tp_size}"
            raise self._error(f"{problem}, not {kind.gpus} (gpus)", f"{field}.profile")
        self._profiles.append(path)
        return profile

    def _hbm_bytes(self, kind: _Worker, field: str) -> int:
        if kind.hbm_gib is not None:
            if kind.hbm_gib * GIB < 1:
                raise self._error("less than a byte", f"{field}.hbm_gib")
            return int(kind.hbm_gib * GIB)
        if kind.hardware is None:
            raise self._error("a profile does not say how much there is", f"{field}.hbm_gib")
        size_bytes = page_bytes_of(HARDWARE[kind.hardware], kind.gpus, COMPUTE[self._fleet.model])
        if size_bytes <= 0:
            problem = f"{self._fleet.model} does not fit {kind.gpus} x {kind.hardware}"
            raise self._error(
                f"{problem}: {-size_bytes / GIB:.0f} GiB are missing", f"{field}.gpus"
            )
        return size_bytes

    def _links(self, names: set[str]) -> Iterator[tuple[tuple[str, str], Link]]:
        for at, link in enumerate(self._fleet.links):
            for end, field in ((link.source, "from"), (link.target, "to")):
                if end not in names:
                    raise self._error(f"no worker {end!r}", f"links[{at}].{field}")
            seconds_per_byte = 8.0 / (link.gbit_per_s * 1e9)
            yield (link.source, link.target), Link(link.latency_us * 1e-6, seconds_per_byte)

    def _error(self, problem: str, field: str) -> SimulationError:
        return SimulationError(str(self._path), problem, field)
