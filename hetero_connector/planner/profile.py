"""A cost model on disk: the JSON file that `heterocache calibrate` writes, and engines keep.

`CostProfile` is the value; the `_File` structs are the file, field by field. A profile names the
model and the machine it was measured on (`ProfileSubject`) and is refused for any other. What an
engine keeps in its SSD directory is such a file, too, with what it has learned of its sessions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import ConfigError
from hetero_connector.planner.checkpoints import PastReuse
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.cost_fit import RelativeErrors
from hetero_connector.planner.cost_model import (
    CostModel,
    HandoffCost,
    RequestOverhead,
)
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.planner.sessions import Pace
from hetero_connector.spec.state_types import StateType

PROFILE_FORMAT = 3
"""Version of the file's meaning."""

_KEY = "planner_profile"
_Kind = TypeVar("_Kind", "_Header", "_File")
_Coefficients = TypeVar(
    "_Coefficients", ComputeCoefficients, InterferenceCoefficients, RequestOverhead, HandoffCost
)


@dataclass(frozen=True)
class ProfileSubject:
    """The model and machine that a profile was measured on: its figures hold for no other.

    Everything that decides how long steps and loads take, except a model's weights: a tuned
    model costs what its base model costs, and it does not matter where its files are.
    """

    architecture: str
    """Model class, e.g. `LlamaForCausalLM`."""
    config: str
    """Digest of the model's config as the engine runs it."""
    model_dtype: str
    quantization: str
    """"" for none."""
    kv_cache_dtype: str
    tp_size: int
    machine: str
    """The device and how many there are; "" if unknown."""

    @classmethod
    def of(cls, description: Mapping[str, Any], machine: str = "") -> ProfileSubject:
        """Build it from `Fingerprint.describe`, or from the copy of that in a journal.

        Raises KeyError if an entry is missing.
        """
        config = json.dumps(description["hf_config"], sort_keys=True).encode()
        return cls(
            str(description["architecture"]),
            hashlib.blake2b(config, digest_size=8).hexdigest(),
            str(description["model_dtype"]),
            str(description["quantization"] or ""),
            str(description["kv_cache_dtype"]),
            int(description["tp_size"]),
            machine,
        )

    def differences(self, here: ProfileSubject) -> list[str]:
        """Describe each difference in words. Machines are compared only if both are known."""
        measured, present = asdict(self), asdict(here)
        if not (self.machine and here.machine):
            del measured["machine"]
        return [
            f"{name} {value!r} there, {present[name]!r} here"
            for name, value in measured.items()
            if value != present[name]
        ]


@dataclass(frozen=True)
class FitError:
    """The error of a fit on its own samples, each predicted before it was learned."""

    samples: int
    median: float
    """Relative: 0.1 is ten per cent."""
    p95: float

    @classmethod
    def of(cls, errors: RelativeErrors) -> FitError | None:
        """Return None before the first sample."""
        return cls(errors.count, errors.median, errors.p95) if errors.count else None


_Bytes = Annotated[int, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class CopyEngines:
    """The smallest pages that a GPU's copy engines move faster than a kernel; None: none."""

    load_from_bytes: _Bytes | None = None
    save_from_bytes: _Bytes | None = None

    def __str__(self) -> str:
        """Describe it in words, for people."""
        sizes = {"loads": self.load_from_bytes, "saves": self.save_from_bytes}
        return ", ".join(f"{x} from {n} bytes" if n else f"no {x}" for x, n in sizes.items())


@dataclass(frozen=True)
class CostProfile:
    """Coefficients of a `CostModel`, and how well they fitted. None: not measured."""

    model: str
    """For people: its path or repository."""
    subject: ProfileSubject
    compute: ComputeCoefficients
    compute_error: FitError | None = None
    load: Mapping[Tier, TierRates] = field(default_factory=dict)
    """The tiers that were measured."""
    load_errors: Mapping[Tier, FitError] = field(default_factory=dict)
    interference: InterferenceCoefficients | None = None
    interference_error: FitError | None = None
    overhead: RequestOverhead | None = None
    overhead_error: FitError | None = None
    """The error of the whole time to first token, steps and overhead together."""
    handoff: HandoffCost | None = None
    """One engine alone cannot measure it."""
    copy_engines: CopyEngines | None = None
    """None on a machine without a GPU, too."""
    pace: Pace | None = None
    """The pace of the sessions that an engine has served."""
    reuse: PastReuse | None = None
    """The reuse of the requests that it has served; None unless its checkpoints were `adaptive`."""
    learned_until: float = 0.0
    """Unix time, seconds, at which an engine kept it; 0: it was calibrated."""
    step_tokens: int = 0
    """`CostModel.step_tokens` of the engine that was measured; 0: no limit, or not told."""

    @classmethod
    def of(
        cls, costs: CostModel, model: str, subject: ProfileSubject, min_samples: int = 1
    ) -> CostProfile:
        """Take what a cost model has learned. Parts with fewer samples are left out.

        What it knew from a profile stays, as it is now. Compute is always there.
        """
        interference = costs.interference
        tiers = [tier for tier in Tier if costs.load.is_measured(tier, min_samples)]
        errors = {tier: FitError.of(costs.load.errors(tier)) for tier in tiers}
        return cls(
            model,
            subject,
            costs.compute.coefficients,
            FitError.of(costs.compute.errors),
            {tier: costs.load.rates(tier) for tier in tiers},
            {tier: error for tier, error in errors.items() if error},
            interference.coefficients if interference.is_measured(min_samples) else None,
            FitError.of(interference.errors) if interference.is_measured(min_samples) else None,
            costs.overhead if any(costs.overhead) else None,
            handoff=costs.handoff if any(costs.handoff) else None,
            step_tokens=costs.step_tokens,
        )

    def cost_model(self, state_types: Sequence[StateType], *, step_tokens: int = 0) -> CostModel:
        """Make a cost model that starts from this profile and goes on learning.

        `step_tokens`: 0: those of the engine that was measured.
        """
        return CostModel(
            ComputeRegression(self.compute),
            LoadModel(state_types, self.load),
            step_tokens or self.step_tokens,
            InterferenceRegression(self.interference, self.compute),
            self.overhead or RequestOverhead(),
            self.handoff or HandoffCost(),
        )

    def fits(self) -> Iterator[tuple[str, FitError]]:
        """Yield each known error with the name of what was fitted, for people."""
        if self.overhead_error is not None:
            yield "time to first token", self.overhead_error
        if self.compute_error is not None:
            yield "steps", self.compute_error
        for tier, error in self.load_errors.items():
            yield f"loads from {tier.value}", error
        if self.interference_error is not None:
            yield "steps with prefills and decodes", self.interference_error

    @property
    def origin(self) -> str:
        """The source of the figures, in words."""
        machine = self.subject.machine or "an unknown machine"
        if not self.learned_until:
            return f"calibrated on {machine}"
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.learned_until))
        return f"learned on {machine} until {until}"

    def write(self, path: Path) -> None:
        """Write the JSON file. Raises OSError."""
        path.write_bytes(self.as_bytes())

    def as_bytes(self) -> bytes:
        """Return the file."""
        return json.dumps(self.as_json(), indent=1).encode() + b"\n"

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        overhead, delays = self.overhead, self.interference
        file = _File(
            PROFILE_FORMAT,
            self.model,
            self.subject,
            _Compute(*self.compute, fit=self.compute_error),
            {
                tier: _Load(
                    rates.latency_s,
                    dict(rates.seconds_per_byte),
                    rates.ahead_s_per_byte,
                    rates.while_computing_s,
                    self.load_errors.get(tier),
                )
                for tier, rates in self.load.items()
            },
            None if delays is None else _Interference(*delays, fit=self.interference_error),
            None if overhead is None else _Request(*overhead, fit=self.overhead_error),
            None if self.handoff is None else _Handoff(*self.handoff),
            self.copy_engines,
            self.pace,
            self.reuse,
            self.learned_until,
            self.step_tokens,
        )
        content: dict[str, Any] = msgspec.to_builtins(file)
        return content

    @classmethod
    def from_json(cls, content: bytes) -> CostProfile:
        """Read a file's content. Raises ValueError that names the place of what is wrong."""
        try:
            version = _decode(content, _Header).format
        except msgspec.ValidationError as error:
            raise ValueError(f"it is no profile of 'heterocache calibrate': {error}") from error
        if version != PROFILE_FORMAT:
            raise ValueError(f"format {version}, this version reads {PROFILE_FORMAT}")
        file = _decode(content, _File)
        compute = file.compute.coefficients(ComputeCoefficients)
        if not any(compute):
            raise ValueError("compute: every coefficient is 0, computing cannot be free")
        interference, request, handoff = file.interference, file.request, file.handoff
        return cls(
            file.model,
            file.subject,
            compute,
            file.compute.fit,
            {tier: load.rates() for tier, load in file.load.items()},
            {tier: load.fit for tier, load in file.load.items() if load.fit},
            interference.coefficients(InterferenceCoefficients) if interference else None,
            interference.fit if interference else None,
            request.coefficients(RequestOverhead) if request else None,
            request.fit if request else None,
            handoff.coefficients(HandoffCost) if handoff else None,
            file.copy_engines,
            file.pace,
            file.reuse,
            file.learned_until,
            file.step_tokens,
        )

    @classmethod
    def read(cls, path: Path, subject: ProfileSubject | None = None) -> CostProfile:
        """Read the file. Raises ConfigError naming `planner_profile` and what is wrong with it.

        `subject`: the model and machine the costs are for; a profile of any other is refused.
        """
        again = "write a new one with 'heterocache calibrate'"
        try:
            profile = cls.from_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(_KEY, f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(_KEY, f"{path}: {error}; {again}") from error
        differences = profile.subject.differences(subject) if subject else []
        if differences:
            raise ConfigError(
                _KEY,
                f"{path} was measured for {profile.model}: {'; '.join(differences)}; {again}, for "
                "this model on this machine",
            )
        return profile


_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class _Header(msgspec.Struct):
    """The part of the file that every version has."""

    format: int


class _Section(msgspec.Struct, kw_only=True):
    """Coefficients by name, and how well they fitted."""

    fit: FitError | None = None

    def coefficients(self, kind: type[_Coefficients]) -> _Coefficients:
        return kind(*(getattr(self, name) for name in kind._fields))


class _Compute(_Section):
    step_s: _Seconds
    token_s: _Seconds
    attention_s: _Seconds


class _Load(msgspec.Struct):
    latency_s: _Seconds
    seconds_per_byte: dict[StateType, _Seconds]
    ahead_s_per_byte: _Seconds
    while_computing_s: _Seconds = 0.0
    fit: FitError | None = None

    def rates(self) -> TierRates:
        return TierRates(
            self.latency_s, self.seconds_per_byte, self.ahead_s_per_byte, self.while_computing_s
        )


class _Interference(_Section):
    step_s: _Seconds
    decode_s: _Seconds
    context_s: _Seconds
    mixed_s: _Seconds
    token_s: _Seconds
    attention_s: _Seconds


class _Request(_Section):
    frontend_s: _Seconds
    frontend_token_s: _Seconds
    scheduling_s: _Seconds
    scheduling_token_s: _Seconds


class _Handoff(_Section):
    handoff_s: _Seconds
    handoff_token_s: _Seconds


class _File(msgspec.Struct, omit_defaults=True):
    """The whole file. It lacks the sections of what was not measured."""

    format: int
    model: str
    subject: ProfileSubject
    compute: _Compute
    load: dict[Tier, _Load]
    interference: _Interference | None = None
    request: _Request | None = None
    handoff: _Handoff | None = None
    copy_engines: CopyEngines | None = None
    pace: Pace | None = None
    reuse: PastReuse | None = None
    learned_until: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)] = 0.0
    step_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0


def _decode(content: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
