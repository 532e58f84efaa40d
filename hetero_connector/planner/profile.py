"""A cost model on disk: what `heterocache calibrate` measured, as JSON.

What a cost profile was measured on: its figures hold for no other model or machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import ConfigError
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.cost_fit import RelativeErrors
from hetero_connector.planner.cost_model import CostModel, CostWeights
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.planner.request_overhead import (
    NO_HANDOFF,
    NO_OVERHEAD,
    HandoffCost,
    RequestOverhead,
)
from hetero_connector.spec.state_types import StateType

PROFILE_FORMAT = 2
"""Version of the file's meaning."""

_KEY = "planner_profile"
_Kind = TypeVar("_Kind", Tier, StateType)
_Coefficients = TypeVar("_Coefficients", InterferenceCoefficients, RequestOverhead, HandoffCost)


@dataclass(frozen=True)
class FitError:
    """How well the fit predicted the samples it was made from, each before it was learned."""

    samples: int
    median: float
    """Relative: 0.1 is ten per cent."""
    p95: float

    @classmethod
    def of(cls, errors: RelativeErrors) -> FitError | None:
        """None before the first sample."""
        return cls(errors.count, errors.median, errors.p95) if errors.count else None


@dataclass(frozen=True)
class CostProfile:
    """Coefficients of a `CostModel`, and how well they fitted."""

    model: str
    """For people: its path or repository."""
    subject: ProfileSubject
    compute: ComputeCoefficients
    compute_error: FitError | None = None
    load: Mapping[Tier, TierRates] = field(default_factory=dict)
    """Tiers that were measured."""
    load_errors: Mapping[Tier, FitError] = field(default_factory=dict)
    interference: InterferenceCoefficients | None = None
    """None: not measured."""
    interference_error: FitError | None = None
    overhead: RequestOverhead | None = None
    """None: not measured."""
    overhead_error: FitError | None = None
    """Of the whole time to first token, steps and overhead together."""
    handoff: HandoffCost | None = None
    """None: not measured. One engine alone cannot."""

    @classmethod
    def of(cls, costs: CostModel, model: str, subject: ProfileSubject) -> CostProfile:
        """What the cost model has learned. Tiers without a sample are left out."""
        errors = {tier: FitError.of(costs.load.errors(tier)) for tier in Tier}
        known = {tier: error for tier, error in errors.items() if error}
        return cls(
            model,
            subject,
            costs.compute.as_a_rule,
            FitError.of(costs.compute.errors),
            {tier: costs.load.rates(tier) for tier in known},
            known,
            costs.interference.coefficients if costs.interference.measured else None,
            FitError.of(costs.interference.errors),
            costs.overhead if any(costs.overhead) else None,
            handoff=costs.handoff if any(costs.handoff) else None,
        )

    def fits(self) -> Iterator[tuple[str, FitError]]:
        """How far off each fit is, by what it is of, as far as that is known."""
        if self.overhead_error is not None:
            yield "time to first token", self.overhead_error
        if self.compute_error is not None:
            yield "steps", self.compute_error
        for tier, error in self.load_errors.items():
            yield f"loads from {tier.value}", error
        if self.interference_error is not None:
            yield "steps of prefills beside decodes", self.interference_error

    def cost_model(
        self,
        state_types: Sequence[StateType],
        weights: CostWeights | None = None,
        step_tokens: int = 0,
    ) -> CostModel:
        """A cost model that starts from this profile and goes on learning."""
        return CostModel(
            ComputeRegression(self.compute),
            LoadModel(state_types, self.load),
            weights or CostWeights(),
            step_tokens,
            InterferenceRegression(self.interference, self.compute),
            self.overhead or NO_OVERHEAD,
            self.handoff or NO_HANDOFF,
        )

    def write(self, path: Path) -> None:
        """Write the JSON file. Raises OSError."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        load = {
            tier.value: {
                "latency_s": rates.latency_s,
                "seconds_per_byte": {t.value: s for t, s in rates.seconds_per_byte.items()},
                "ahead_s_per_byte": rates.ahead_s_per_byte,
                "beside_s": rates.beside_s,
                "fit": _error_json(self.load_errors.get(tier)),
            }
            for tier, rates in self.load.items()
        }
        compute = self.compute._asdict() | {"fit": _error_json(self.compute_error)}
        document: dict[str, Any] = {
            "format": PROFILE_FORMAT,
            "model": self.model,
            "subject": asdict(self.subject),
            "compute": compute,
            "load": load,
        }
        if self.interference is not None:
            fit = _error_json(self.interference_error)
            document["interference"] = self.interference._asdict() | {"fit": fit}
        if self.overhead is not None:
            fit = _error_json(self.overhead_error)
            document["request"] = self.overhead._asdict() | {"fit": fit}
        if self.handoff is not None:
            document["handoff"] = self.handoff._asdict() | {"fit": None}
        return document

    @classmethod
    def read(cls, path: Path, subject: ProfileSubject | None = None) -> CostProfile:
        """Raises ConfigError naming `planner_profile` and what is wrong with the file.

        `subject`: what the costs are wanted for; a profile of another one is refused.
        """
        try:
            profile = cls.from_json(json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(_KEY, f"cannot read {path}: {error.strerror}") from error
        except _BadProfileError as error:
            raise ConfigError(
                _KEY, f"{path}: {error}; write a new one with 'heterocache calibrate'"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(_KEY, f"{path} is not JSON: {error}") from error
        differences = profile.subject.differences(subject) if subject else []
        if differences:
            raise ConfigError(
                _KEY,
                f"{path} was measured for {profile.model}: {'; '.join(differences)}; write a new "
                "one with 'heterocache calibrate', for this model on this machine",
            )
        return profile

    @classmethod
    def from_json(cls, document: object) -> CostProfile:
        """From the file's content. Raises ValueError that says where it is wrong."""
        top = _Section("the profile", document)
        version = top.get("format")
        if version != PROFILE_FORMAT or isinstance(version, bool):
            raise _BadProfileError(f"format {version!r}, this version reads {PROFILE_FORMAT}")
        model = top.text("model")
        compute = _Section("compute", top.get("compute"))
        coefficients = ComputeCoefficients(
            *(compute.number(name) for name in ComputeCoefficients._fields)
        )
        if not any(coefficients):
            raise _BadProfileError("compute: every coefficient is 0, computing cannot be free")
        delays, delays_error = _read_optional(top, "interference", InterferenceCoefficients)
        overhead, overhead_error = _read_optional(top, "request", RequestOverhead)
        handoff, _ = _read_optional(top, "handoff", HandoffCost)
        if "handover" in top:  # its name in profiles of earlier releases
            earlier = top.section("handover")
            handoff = HandoffCost(earlier.number("handover_s"), earlier.number("handover_token_s"))
        sections = {
            _member(Tier, name): _Section(f"load.{name}", value)
            for name, value in _Section("load", top.get("load")).items()
        }
        errors = {tier: _read_error(section) for tier, section in sections.items()}
        return cls(
            model,
            _read_subject(top.section("subject")),
            coefficients,
            _read_error(compute),
            {tier: _read_rates(section) for tier, section in sections.items()},
            {tier: error for tier, error in errors.items() if error},
            delays,
            delays_error,
            overhead,
            overhead_error,
            handoff,
        )


class _BadProfileError(ValueError):
    """What is wrong with a profile, and where."""


class _Section:
    """An object of the file, with its place for messages."""

    def __init__(self, place: str, value: object) -> None:
        if not isinstance(value, dict):
            raise _BadProfileError(f"{place} should be an object, got {value!r}")
        self._place, self._value = place, value

    def get(self, name: str) -> Any:
        if name not in self._value:
            raise _BadProfileError(f"{self._place} lacks {name!r}")
        return self._value[name]

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def items(self) -> list[tuple[str, Any]]:
        return list(self._value.items())

    def section(self, name: str) -> _Section:
        return _Section(f"{self._place}.{name}", self.get(name))

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise _BadProfileError(f"{self._place}.{name} should be a string, got {value!r}")
        return value

    def number(self, name: str) -> float:
        """A finite number of at least 0."""
        value = self.get(name)
        try:
            good = not isinstance(value, bool) and 0.0 <= float(value) < math.inf
        except (TypeError, ValueError, OverflowError):
            good = False
        if not good or isinstance(value, str):
            raise _BadProfileError(
                f"{self._place}.{name} should be a finite number of at least 0, got {value!r}"
            )
        return float(value)


def _member(kind: type[_Kind], name: str) -> _Kind:
    try:
        return kind(name)
    except ValueError:
        raise _BadProfileError(f"{name!r} is no {kind.__name__} of this version") from None


def _read_subject(section: _Section) -> ProfileSubject:
    return ProfileSubject(
        section.text("architecture"),
        section.text("config"),
        section.text("model_dtype"),
        section.text("quantization"),
        section.text("kv_cache_dtype"),
        int(section.number("tp_size")),
        section.text("machine"),
    )


def _read_rates(section: _Section) -> TierRates:
    per_byte = section.section("seconds_per_byte")
    return TierRates(
        section.number("latency_s"),
        {_member(StateType, name): per_byte.number(name) for name, _ in per_byte.items()},
        section.number("ahead_s_per_byte"),
        section.number("beside_s") if "beside_s" in section else 0.0,
    )


def _read_optional(
    top: _Section, name: str, kind: type[_Coefficients]
) -> tuple[_Coefficients | None, FitError | None]:
    """Profiles written before it was measured have none."""
    if name not in top:
        return None, None
    section = top.section(name)
    numbers = [section.number(field) for field in kind._fields]
    return kind(*numbers), _read_error(section)


def _read_error(section: _Section) -> FitError | None:
    if section.get("fit") is None:
        return None
    fit = section.section("fit")
    return FitError(int(fit.number("samples")), fit.number("median"), fit.number("p95"))


def _error_json(error: FitError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"samples": error.samples, "median": error.median, "p95": error.p95}


@dataclass(frozen=True)
class ProfileSubject:
    """What decides how long steps and loads take, a model's weights apart.

    A tuned model costs what its base model costs; where its files lie does not matter.
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
    """The device and how many there are; "" where nothing is said of it."""

    @classmethod
    def of(cls, description: Mapping[str, Any], machine: str = "") -> ProfileSubject:
        """From `Fingerprint.describe`, or what a journal keeps of it. KeyError if it lacks any."""
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

    def differences(self, other: ProfileSubject) -> list[str]:
        """What is not the same here, in `other`, in words; machines only if both are known."""
        mine, theirs = asdict(self), asdict(other)
        if not (self.machine and other.machine):
            del mine["machine"]
        return [
            f"{name} {value!r} there, {theirs[name]!r} here"
            for name, value in mine.items()
            if value != theirs[name]
        ]
