"""Checks of a router's configuration values, of the same kind as `hetero_connector.config_values`.

What would otherwise fail once the router listens is tried here; nothing is connected to.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hetero_connector import config_values as values
from hetero_connector.errors import ConfigError
from ownership.directory.opening import open_directory
from ownership.router import open_files

_MAX_S = 7 * 86_400
"""The kernel's timers take no more than 24 days."""
_MAX_BODY_MIB = 1024
_LABEL = re.compile(r"[\w-]{1,63}")
_SERVICE = re.compile(
    r"(?:(?P<namespace>[a-z0-9-]{1,63})/)?(?P<name>[a-z0-9-]{1,63})(?::(?P<port>[A-Za-z0-9-]{1,15}))?"
)


class KubernetesService(NamedTuple):
    """A Service whose pods are the workers."""

    namespace: str
    """"" for the router's own."""
    name: str
    port: str = ""
    """The name or number of one of its pods' ports; "" for the first."""


def count(key: str, value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 20:
        raise ConfigError(key, f"expected a whole number from {least} to 1048576, got {value!r}")
    return value


def above_0(key: str, value: object) -> int:
    return count(key, value, least=1)


def connections(key: str, value: object) -> int:
    """Check that a process may have the open files for so many."""
    number = above_0(key, value)
    if problem := open_files.problem_of(number):
        raise ConfigError(key, problem)
    return number


def seconds(key: str, value: object) -> float:
    if (number := values.number(key, value)) > _MAX_S:
        raise ConfigError(key, f"expected at most {_MAX_S} seconds, a week, got {value!r}")
    return number


def body_mib(key: str, value: object) -> float:
    if (mib := values.number(key, value)) > _MAX_BODY_MIB:
        raise ConfigError(key, f"expected at most {_MAX_BODY_MIB}, got {value!r}")
    return mib


def port(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
        raise ConfigError(key, f"expected a port, 0 (any that is free) to 65535, got {value!r}")
    return value


def base_url(key: str, value: object) -> str:
    """Check `http://host:port` and return it without a slash at its end."""
    shown = values.without_password(value) if isinstance(value, str) else value
    expected = f"expected http://host:port or https://host:port, got {shown!r}"
    if not isinstance(value, str) or not value.isprintable() or "@" in value:
        raise ConfigError(key, expected)
    try:
        parts = urlsplit(value)
        is_base = parts.scheme in ("http", "https") and _is_host(parts.hostname or "")
        is_base = is_base and parts.port != 0 and not parts.netloc.endswith(":")
    except ValueError as error:
        raise ConfigError(key, f"{expected}: {error}") from error
    if not is_base or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(key, expected)
    return value.rstrip("/")


def _is_host(host: str) -> bool:
    """Return True for an address, and for a name. What ends in a number can only be an address, so
    the half of one is refused."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdecimal()
    return True


def model(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(key, f"expected a path or the name of a repository, got {value!r}")
    return value


def template(key: str, value: object) -> str:
    """Return the text of a file with a chat template."""
    if not isinstance(value, str) or not value:
        raise ConfigError(key, f"expected the path of a file, got {value!r}")
    try:
        text = Path(value).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(key, f"cannot read {value}: {why}") from error
    if not text.strip():
        raise ConfigError(key, f"{value} is empty")
    return text


def arguments(key: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(key, f"expected names with values, got {value!r}")
    return value


def directory(key: str, value: object) -> str:
    """Check the whole URL, and that the packages are here. Redis itself may be down."""
    url = values.fleet_directory(key, value)
    if url:
        try:
            open_directory(url).close()
        except (ValueError, OSError) as error:
            raise ConfigError(key, str(error)) from error
    return url


def collector(key: str, value: object) -> str:
    """Check a whole URL: the exporter adds no path to it."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^/\s]+/\S+", value):
        raise ConfigError(key, f"expected http://host:port/path, got {value!r}")
    _need(key, "traces", "opentelemetry", "opentelemetry.exporter.otlp.proto.http")
    return value


def picker_port(key: str, value: object) -> int:
    number = port(key, value)
    _need(key, "ext-proc", "grpc", "google.protobuf")
    return number


def _need(key: str, extra: str, *modules: str) -> None:
    for name in modules:
        try:
            is_here = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # a package that it is in
            is_here = False
        if not is_here:
            raise ConfigError(key, f"{name} is missing: pip install 'heterocache[{extra}]'")


def tls(key: str, value: object) -> Path:
    folder = Path(value).expanduser() if isinstance(value, str) else None
    if folder is None or not all((folder / x).is_file() for x in ("tls.crt", "tls.key")):
        raise ConfigError(key, f"expected a folder with tls.crt and tls.key, got {value!r}")
    return folder


def dns(key: str, value: object) -> str:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(key, f"expected host:port, got {value!r}")
    return f"{host}:{port}"


def service(key: str, value: object) -> KubernetesService:
    found = _SERVICE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(key, f"expected [namespace/]service[:port], got {value!r}")
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError(key, "works in a pod only: KUBERNETES_SERVICE_HOST is not set")
    return KubernetesService(found["namespace"] or "", found["name"], found["port"] or "")
