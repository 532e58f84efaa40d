"""The router's configuration: a YAML file, checked once at start.

Each key is declared once, as a field of `RouterConfig`, like those of an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import yaml

from hetero_connector import config_values as values
from hetero_connector.config import Key, declare, keys_of, nearest
from hetero_connector.errors import ConfigError, RouterConfigError
from hetero_connector.units import MIB
from ownership.router import config_values as checks
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import DEFAULT_POLICY, POLICIES, POOLED

LEAST_LOADED = "least_loaded"
_SOURCES = ("workers", "workers_file", "workers_dns", "workers_kubernetes")


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


def worker_list(key: str, value: object) -> tuple[WorkerAddress, ...]:
    """Check a list of URLs, or of objects with `url`, `name`, `drain` and `role`.

    Raises a ConfigError, or a group of one for each entry that is wrong.
    """
    if not isinstance(value, list):
        raise ConfigError(key, f"expected a list of workers, got {type(value).__name__}")
    found: dict[str, WorkerAddress] = {}
    errors: list[ConfigError] = []
    for number, entry in enumerate(value):
        place = f"{key}[{number}]"
        try:
            worker = _worker(place, entry)
            if worker.name in found:
                raise ConfigError(place, f"there are two workers named {worker.name!r}")
            found[worker.name] = worker
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup(key, errors)
    return tuple(found.values())


def _worker(place: str, entry: object) -> WorkerAddress:
    given = {"url": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or "url" not in given:
        raise ConfigError(place, f"expected a URL, or an object with `url`, got {entry!r}")
    if unknown := given.keys() - {"url", "name", "drain", "role"}:
        problem = f"unknown key {min(map(str, unknown))!r}; the keys are url, name, drain, role"
        raise ConfigError(place, problem)
    url = checks.base_url(f"{place}.url", given["url"])
    name = values.worker_name(f"{place}.name", given.get("name", urlsplit(url).netloc))
    if not name.isprintable():  # answers have it in a header
        raise ConfigError(
            f"{place}.name", f"expected text without control characters, got {name!r}"
        )
    is_draining = values.boolean(f"{place}.drain", given.get("drain", False))
    role = Role(
        values.one_of(*(x.value for x in Role))(f"{place}.role", given.get("role", Role.BOTH))
    )
    return WorkerAddress(name, url, is_draining, role)


def _secrets(key: str, value: object) -> tuple[bytes, ...]:
    """Read a file with a key in each line; return their digests, so that no log shows a key."""
    path = _secret_file(key, value)
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
    path = _secret_file(key, value)
    if not (text := _read(key, path).strip()) or "\n" in text:
        raise ConfigError(key, f"expected one key in {path}")
    return Secret(text)


def _secret_file(key: str, value: object) -> Path:
    try:
        return values.file_path(key, value)
    except ConfigError:
        problem = "expected the path of a file that has keys; what is given names no file, and is "
        problem += "not shown here, because it may be a key"
        raise ConfigError(key, problem) from None


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
        checks.dns,
        "A name whose addresses are the workers, such as a headless Service; asked every `probe_s`",
        "",
        unset="none",
    )
    workers_kubernetes: checks.KubernetesService | None = declare(
        "`[namespace/]service[:port]`",
        checks.service,
        "A Service of Kubernetes whose pods are the workers, asked every `probe_s` by the router's "
        "own account. A pod that ends gets nothing new. `port` is a port's name or number, the "
        "first one if it is left out",
        None,
        unset="none",
    )
    model_path: str = declare(
        "path or repository",
        checks.model,
        "The workers' model, on this machine: its tokenizer and chat template; no weights are "
        "read. With it, the router knows which chunks a prompt consists of",
        "",
        unset="none: only prompts of token ids are known",
    )
    chat_template: str = declare(
        "path",
        checks.template,
        "The chat template that the workers were started with by `--chat-template`",
        "",
        unset="the model's own",
    )
    chat_template_kwargs: dict[str, object] | None = declare(
        "names with values",
        checks.arguments,
        "The workers' own `--default-chat-template-kwargs`, such as `{enable_thinking: false}`",
        None,
        unset="none",
    )
    directory: str = declare(
        "URL",
        checks.directory,
        "The workers' own `directory`, which says who has which chunks",
        "",
        unset="none",
    )
    directory_s: float = declare(
        "number > 0",
        checks.seconds,
        "Seconds in which the directory must answer. A request is placed without it afterwards. An "
        "answer takes about 1 ms; the rest is for busy machines and slow networks, because a "
        "placement without it may compute a whole prompt again",
        0.25,
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
        values.appendable_file,
        "A file that gets a line of JSON for each request that a policy has placed",
        None,
        unset="none",
    )
    otlp_traces_endpoint: str = declare(
        "URL",
        checks.collector,
        "A collector of OpenTelemetry spans, by OTLP over HTTP, such as "
        "`http://localhost:4318/v1/traces`. Needs the extra `traces`",
        "",
        unset="no spans",
    )
    host: str = declare("address", values.worker_name, "Address to listen at", "0.0.0.0")
    port: int = declare("port", checks.port, "Port to listen at", 8080)
    ext_proc_port: int | None = declare(
        "port",
        checks.picker_port,
        "Port of the endpoint picker for Envoy, by gRPC. Needs the extra `ext-proc`",
        None,
        unset="none",
    )
    ext_proc_tls: Path | None = declare(
        "path",
        checks.tls,
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
        "A file with a key of the workers, for the router's own questions and, with `api_keys`, "
        "for requests in place of the client's",
        Secret(""),
        unset="none",
    )
    max_body_mib: float = declare(
        "number > 0", checks.body_mib, "Largest body of a request; status 413 above", 64.0
    )
    max_connections: int | None = declare(
        "whole number > 0",
        checks.connections,
        "Connections of clients that each process has at once. Those beyond get status 503 or are "
        "closed; `/health`, `/ready` and `/metrics` are still served",
        None,
        unset="half of the open files that a process may have (`ulimit -Hn`), less 128",
    )
    max_in_flight: int = declare(
        "whole number > 0",
        checks.above_0,
        "Requests that a worker has at once; more wait here. Set it near the engine's "
        "`max_num_seqs`, so that the router and not the engine's queue decides who is next",
        256,
    )
    max_queued: int = declare(
        "whole number", checks.count, "Requests that may wait; status 429 above", 1024
    )
    queue_s: float = declare(
        "number > 0", checks.seconds, "Seconds that a request may wait; status 429 afterwards", 60.0
    )
    silent_s: float = declare(
        "number > 0",
        checks.seconds,
        "Seconds without a byte from a worker after which its request is given up. A long prompt "
        "takes that long before its first token",
        600.0,
    )
    lease_s: float = declare(
        "number > 0",
        checks.seconds,
        "Seconds after which a reservation is freed that another proxy has made, and not told "
        "anything more of",
        600.0,
    )
    client_s: float = declare(
        "number > 0",
        checks.seconds,
        "Seconds for which a client may read nothing of its answer, or send nothing of its body, "
        "before its request is ended; within so many it sends a request's head",
        120.0,
    )
    probe_s: float = declare(
        "number > 0",
        checks.seconds,
        "Seconds between two questions to a worker's `/health` and `/v1/models`",
        2.0,
    )
    probe_timeout_s: float = declare(
        "number > 0",
        checks.seconds,
        "Seconds that they may take. After three failures the worker is down: requests that have "
        "no byte since the first failure are sent elsewhere or end with an error",
        5.0,
    )
    drain_s: float = declare(
        "number > 0",
        checks.seconds,
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
    given, problems = _read_yaml(path)
    if not isinstance(given, dict):
        raise RouterConfigError(str(path), ["expected `key: value` lines; `workers` is needed"])
    checked = _checked(given, KEYS, problems)
    if not any(given.get(source) for source in _SOURCES):
        problems.append(f"no workers: set {_either(_SOURCES)}")
    config, workers = RouterConfig(**checked), checked.get("workers", ())
    if config.workers_file is not None:
        try:
            workers = (*workers, *read_workers(config.workers_file))
        except RouterConfigError as error:
            problems += [f"workers_file: {line}" for line in str(error).splitlines()]
    is_right = given.keys() <= checked.keys()
    problems += _conflicts(config, workers) if is_right else []
    if problems:
        raise RouterConfigError(str(path), problems)
    return config


def check_keys(source: str, given: Mapping[str, object], keys: Sequence[Key]) -> RouterConfig:
    """Check keys that are in no file, of which `keys` may be given. Raises RouterConfigError."""
    problems: list[str] = []
    config = RouterConfig(**_checked(given, keys, problems))
    problems += [] if problems else _conflicts(config, ())
    if problems:
        raise RouterConfigError(source, problems)
    return config


def _checked(
    given: Mapping[str, object], keys: Sequence[Key], problems: list[str]
) -> dict[str, Any]:
    """Return the values that are right, and add a line to `problems` for each other."""
    parsers = {key.name: key.parse for key in keys}
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parsers:
            problems.append(f"unknown key {name!r}; {nearest(str(name), keys)}")
            continue
        try:
            checked[name] = parsers[name](name, value)
        except* ConfigError as errors:
            problems += _lines_of(errors)
    return checked


def _conflicts(config: RouterConfig, workers: Sequence[WorkerAddress]) -> Iterator[str]:
    """Yield what is wrong with keys that are right alone."""
    policy = config.policy_name
    if POOLED.get(policy):
        roles = {worker.role for worker in workers}
        if missing := {Role.PREFILL, Role.DECODE} - roles:
            yield f"policy: {policy} needs a worker with `role: {min(missing)}`"
    if config.decisions is not None and policy == LEAST_LOADED:
        yield f"decisions: {policy} writes none: set model_path, directory or another policy"
    if config.ext_proc_port and config.ext_proc_port == config.port:
        yield f"ext_proc_port: {config.port} is `port`, too: give each its own"
    if config.ext_proc_tls is not None and config.ext_proc_port is None:
        yield "ext_proc_tls: it is for the endpoint picker: set ext_proc_port"


def read_workers(path: Path) -> tuple[WorkerAddress, ...]:
    """Read a file of workers. Raises RouterConfigError."""
    given, problems = _read_yaml(path)
    workers: tuple[WorkerAddress, ...] = ()
    try:
        workers = worker_list("workers", given or [])
    except* ConfigError as errors:
        problems += _lines_of(errors)
    if problems:
        raise RouterConfigError(str(path), problems)
    return workers


def _lines_of(errors: BaseExceptionGroup[ConfigError]) -> Iterator[str]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _lines_of(error)
        else:
            yield f"{error.key}: {error.problem}"


def _read_yaml(path: Path) -> tuple[object, list[str]]:
    """Return the content, and a line for each key that is given twice. Raises RouterConfigError."""
    try:
        text = path.read_bytes()
        return msgspec.yaml.decode(text), list(_given_twice(text))
    except OSError as error:
        raise RouterConfigError(str(path), [error.strerror or str(error)]) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: PyYAML's
        raise RouterConfigError(str(path), [f"not YAML: {' '.join(str(error).split())}"]) from error


def _given_twice(text: bytes) -> Iterator[str]:
    """YAML forbids this, but its readers take the last one."""
    nodes, seen = [yaml.compose(text, yaml.SafeLoader)], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # a reference to another part, or to itself
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for name, value in node.value:
                line = name.start_mark.line + 1
                if isinstance(name, yaml.ScalarNode) and name.value in lines:
                    yield f"{name.value}: given twice, in lines {lines[name.value]} and {line}"
                else:
                    lines[str(name.value)] = line
                nodes.append(value)
