"""The router's configuration: a YAML file, checked once at start.

Each key is declared once, as a field of `RouterConfig`, like those of an engine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from hetero_connector import config_values as values
from hetero_connector.config import Key, declare, keys_of, nearest
from hetero_connector.errors import ConfigError, RouterConfigError
from hetero_connector.units import MIB
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import DEFAULT_POLICY, POLICIES, POOLED

LEAST_LOADED = "least_loaded"
_SOURCES = ("workers", "workers_file", "workers_dns", "workers_kubernetes")
_SERVICE = re.compile(
    r"(?:(?P<namespace>[a-z0-9-]{1,63})/)?(?P<name>[a-z0-9-]{1,63})(?::(?P<port>[A-Za-z0-9-]{1,15}))?"
)


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


class WorkerAddress(NamedTuple):
    """One worker as the configuration names it."""

    name: str
    url: str
    """`http://host:port`."""
    is_draining: bool = False
    """True: it ends what it has begun, and gets nothing new."""
    role: Role = Role.BOTH


class KubernetesService(NamedTuple):
    """A Service whose pods are the workers."""

    namespace: str
    """"" for the router's own."""
    name: str
    port: str = ""
    """The name or number of one of its pods' ports; "" for the first."""


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 20:
        raise ConfigError(key, f"expected a whole number from 0 to 1048576, got {value!r}")
    return value


def _above_0(key: str, value: object) -> int:
    count = _count(key, value)
    if count == 0:
        raise ConfigError(key, "expected at least 1")
    return count


def _port(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
        raise ConfigError(key, f"expected a port, 0 (any that is free) to 65535, got {value!r}")
    return value


def base_url(key: str, value: object) -> str:
    """Check `http://host:port` and return it without a slash at its end."""
    expected = f"expected http://host:port or https://host:port, got {value!r}"
    if not isinstance(value, str):
        raise ConfigError(key, expected)
    try:
        parts = urlsplit(value)
        is_base = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(key, f"{expected}: {error}") from error
    if not is_base or parts.path.strip("/") or parts.query or parts.fragment or "@" in value:
        raise ConfigError(key, expected)
    return value.rstrip("/")


def worker_list(key: str, value: object) -> tuple[WorkerAddress, ...]:
    """Check a list of URLs, or of objects with `url`, `name`, `drain` and `role`."""
    if not isinstance(value, list):
        raise ConfigError(key, f"expected a list of workers, got {type(value).__name__}")
    found: dict[str, WorkerAddress] = {}
    for number, entry in enumerate(value):
        place = f"{key}[{number}]"
        given = {"url": entry} if isinstance(entry, str) else entry
        if not isinstance(given, dict) or "url" not in given:
            raise ConfigError(place, f"expected a URL, or an object with `url`, got {entry!r}")
        if unknown := given.keys() - {"url", "name", "drain", "role"}:
            problem = f"unknown key {min(map(str, unknown))!r}; the keys are url, name, drain, role"
            raise ConfigError(place, problem)
        url = base_url(f"{place}.url", given["url"])
        name = values.worker_name(f"{place}.name", given.get("name", urlsplit(url).netloc))
        if name in found:
            raise ConfigError(place, f"there are two workers named {name!r}")
        is_draining = values.boolean(f"{place}.drain", given.get("drain", False))
        role = Role(values.one_of(*Role)(f"{place}.role", given.get("role", Role.BOTH)))
        found[name] = WorkerAddress(name, url, is_draining, role)
    return tuple(found.values())


def _model(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(key, f"expected a path or the name of a repository, got {value!r}")
    return value


def _new_file(key: str, value: object) -> Path:
    if not isinstance(value, str) or not value or not Path(value).expanduser().parent.is_dir():
        raise ConfigError(key, f"expected a file in a folder that exists, got {value!r}")
    return Path(value).expanduser()


def _url(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise ConfigError(key, f"expected http://host:port/path, got {value!r}")
    return value


def _tls(key: str, value: object) -> Path:
    folder = Path(value).expanduser() if isinstance(value, str) else None
    if folder is None or not all((folder / x).is_file() for x in ("tls.crt", "tls.key")):
        raise ConfigError(key, f"expected a folder with tls.crt and tls.key, got {value!r}")
    return folder


def _dns(key: str, value: object) -> str:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(key, f"expected host:port, got {value!r}")
    return f"{host}:{port}"


def _service(key: str, value: object) -> KubernetesService:
    found = _SERVICE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(key, f"expected [namespace/]service[:port], got {value!r}")
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError(key, "works in a pod only: KUBERNETES_SERVICE_HOST is not set")
    return KubernetesService(found["namespace"] or "", found["name"], found["port"] or "")


def _secrets(key: str, value: object) -> tuple[bytes, ...]:
    """Read a file with a key in each line; return their digests, so that no log shows a key."""
    path = values.file_path(key, value)
    lines = [line.strip() for line in _read(key, path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(key, f"{path} has no key: write one in each line")
    return tuple(digest_of(x) for x in keys)


def digest_of(api_key: str) -> bytes:
    """Return what is kept of an API key."""
    return hashlib.sha256(api_key.encode(errors="replace")).digest()


class Secret(str):
    """Text that does not show when it is printed."""

    def __repr__(self) -> str:
        return "'...'"


def _secret(key: str, value: object) -> Secret:
    path = values.file_path(key, value)
    if not (text := _read(key, path).strip()) or "\n" in text:
        raise ConfigError(key, f"expected one key in {path}")
    return Secret(text)


def _read(key: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"cannot read {path}: {error}") from error


@dataclass(frozen=True)
class RouterConfig:
    """A checked configuration, defaults filled in."""

    workers: tuple[WorkerAddress, ...] = declare(
        "list of URLs, or of `{url, name, drain, role}`",
        worker_list,
        "The workers. With `drain: true` a worker ends what it has begun and gets nothing new. "
        "`role` is `both`, `prefill` or `decode`; only policies with pools read it",
        (),
        unset="none",
    )
    workers_file: Path | None = declare(
        "path",
        values.file_path,
        "A YAML file with such a list, read again when it changes. A worker that is taken out of "
        "it ends what it has begun",
        None,
        unset="none",
    )
    workers_dns: str = declare(
        "`host:port`",
        _dns,
        "A name whose addresses are the workers, such as a headless Service; asked every `probe_s`",
        "",
        unset="none",
    )
    workers_kubernetes: KubernetesService | None = declare(
        "`[namespace/]service[:port]`",
        _service,
        "A Service of Kubernetes whose pods are the workers, asked every `probe_s` by the router's "
        "own account. A pod that ends gets nothing new. `port` is a port's name or number, the "
        "first one if it is left out",
        None,
        unset="none",
    )
    model_path: str = declare(
        "path or repository",
        _model,
        "The workers' model, on this machine: its tokenizer and chat template; no weights are "
        "read. With it, the router knows which chunks a prompt consists of",
        "",
        unset="none: only prompts of token ids are known",
    )
    directory: str = declare(
        "URL",
        values.fleet_directory,
        "The workers' own `directory`, which says who has which chunks",
        "",
        unset="none",
    )
    directory_s: float = declare(
        "number > 0",
        values.number,
        "Seconds in which the directory must answer. A request is placed without it afterwards",
        0.05,
    )
    policy: str = declare(
        "name",
        values.one_of(LEAST_LOADED, *POLICIES),
        f"What chooses a worker: {', '.join(f'`{x}`' for x in (LEAST_LOADED, *POLICIES))}. "
        f"{_either([f'`{x}`' for x in POOLED])} send prefills and decodes to workers by role",
        "",
        unset="`ownerserve` with `model_path` or `directory`, else `least_loaded`",
    )
    decisions: Path | None = declare(
        "path",
        _new_file,
        "A file that gets a line of JSON for each request that a policy has placed",
        None,
        unset="none",
    )
    otlp_traces_endpoint: str = declare(
        "URL",
        _url,
        "A collector of OpenTelemetry spans, by OTLP over HTTP, such as "
        "`http://localhost:4318/v1/traces`. Needs the extra `traces`",
        "",
        unset="no spans",
    )
    host: str = declare("address", values.worker_name, "Address to listen at", "0.0.0.0")
    port: int = declare("port", _port, "Port to listen at", 8080)
    ext_proc_port: int | None = declare(
        "port",
        _port,
        "Port of the endpoint picker for Envoy, by gRPC. Needs the extra `ext-proc`",
        None,
        unset="none",
    )
    ext_proc_tls: Path | None = declare(
        "path",
        _tls,
        "A folder with `tls.crt` and `tls.key`, as a Secret of Kubernetes is mounted: the endpoint "
        "picker then speaks TLS. The files may change",
        None,
        unset="no TLS",
    )
    api_keys: tuple[bytes, ...] = declare(
        "path",
        _secrets,
        "A file with one key in each line: requests need one of them, in `Authorization: Bearer` "
        "or `x-api-key`",
        (),
        unset="none: the workers check keys, and get what the client sent",
    )
    worker_api_key: Secret = declare(
        "path",
        _secret,
        "A file with the key that workers get in place of the client's",
        Secret(""),
        unset="none",
    )
    max_body_mib: float = declare(
        "number > 0", values.number, "Largest body of a request; status 413 above", 64.0
    )
    max_in_flight: int = declare(
        "whole number > 0",
        _above_0,
        "Requests that a worker has at once; more wait here. Set it near the engine's "
        "`max_num_seqs`, so that the router and not the engine's queue decides who is next",
        256,
    )
    max_queued: int = declare(
        "whole number", _count, "Requests that may wait; status 429 above", 1024
    )
    queue_s: float = declare(
        "number > 0", values.number, "Seconds that a request may wait; status 429 afterwards", 60.0
    )
    silent_s: float = declare(
        "number > 0",
        values.number,
        "Seconds without a byte from a worker after which its request is given up. A long prompt "
        "takes that long before its first token",
        600.0,
    )
    lease_s: float = declare(
        "number > 0",
        values.number,
        "Seconds after which a reservation is freed that another proxy has made, and not told "
        "anything more of",
        600.0,
    )
    client_s: float = declare(
        "number > 0",
        values.number,
        "Seconds for which a client may read nothing of its answer, or send nothing of its body, "
        "before its request is ended",
        120.0,
    )
    probe_s: float = declare(
        "number > 0",
        values.number,
        "Seconds between two questions to a worker's `/health` and `/v1/models`",
        2.0,
    )
    probe_timeout_s: float = declare(
        "number > 0",
        values.number,
        "Seconds that they may take. After three failures the worker is down: requests that have "
        "no byte since the first failure are sent elsewhere or end with an error",
        5.0,
    )
    drain_s: float = declare(
        "number > 0",
        values.number,
        "Seconds that requests under way get when the router is told to end",
        60.0,
    )

    @property
    def policy_name(self) -> str:
        """The policy, if none was given the one that the other keys make possible."""
        return self.policy or (
            DEFAULT_POLICY if self.model_path or self.directory else LEAST_LOADED
        )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)


KEYS: tuple[Key, ...] = keys_of(RouterConfig)


def read_config(path: Path) -> RouterConfig:
    """Read a configuration. Raises RouterConfigError with a line for each wrong key."""
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise RouterConfigError(str(path), ["expected `key: value` lines; `workers` is needed"])
    parsers = {key.name: key.parse for key in KEYS}
    checked: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in given.items():
        if name not in parsers:
            problems.append(f"unknown key {name!r}; {nearest(str(name), KEYS)}")
            continue
        try:
            checked[name] = parsers[name](name, value)
        except ConfigError as error:
            problems.append(f"{error.key}: {error.problem}")
    if not any(given.get(source) for source in _SOURCES):
        problems.append(f"no workers: set {_either(_SOURCES)}")
    if problems:
        raise RouterConfigError(str(path), problems)
    workers = checked.get("workers", ())
    if "workers_file" in checked:
        workers = read_workers(checked["workers_file"])
    config = RouterConfig(**checked)
    if POOLED.get(config.policy_name):
        roles = {worker.role for worker in workers}
        if missing := {Role.PREFILL, Role.DECODE} - roles:
            problem = f"policy: {config.policy_name} needs a worker with `role: {min(missing)}`"
            raise RouterConfigError(str(path), [problem])
    return config


def read_workers(path: Path) -> tuple[WorkerAddress, ...]:
    """Read a file of workers. Raises RouterConfigError."""
    try:
        return worker_list("workers", read_yaml(path) or [])
    except ConfigError as error:
        raise RouterConfigError(str(path), [f"{error.key}: {error.problem}"]) from error


def read_yaml(path: Path) -> object:
    """Read a YAML file. Raises RouterConfigError."""
    try:
        return msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise RouterConfigError(str(path), [error.strerror or str(error)]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RouterConfigError(str(path), [f"not YAML: {' '.join(str(error).split())}"]) from error
