"""The URL of a Redis directory: one server, Sentinel or Cluster.

    redis://[[user]:password@]host[:6379][/db]            rediss:// for TLS
    redis+sentinel://[[user]:password@]host[:26379],host,.../service[/db]     rediss+sentinel://
    redis+cluster://[[user]:password@]host[:6379],host,...                    rediss+cluster://

followed by `?name=value&...`: `fleet` (the workers of one fleet share a directory; default
`default`), `password_file`, `sentinel_password`, and for TLS the files `tls_ca`, `tls_cert` and
`tls_key`. In a user or password `/`, `?`, `#` and `@` are percent-encoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

SCHEMES = tuple(
    f"{scheme}{kind}://" for kind in ("", "+sentinel", "+cluster") for scheme in ("redis", "rediss")
)
_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379
_FLEET = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_NODE = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:/?#@,\s]+))(?::(?P<port>\d+))?")
_ENCODE = (
    "percent-encode /, ?, # and @ in a user or password (%2F, %3F, %23, %40). The text is not "
    "shown, because it may be a part of a password"
)
_OPTIONS = ("fleet", "password_file", "sentinel_password", "tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True)
class RedisAddress:
    """The address of a fleet's directory, with credentials. Printing it reveals no secret."""

    nodes: tuple[tuple[str, int], ...]
    """Host and port: the server, the Sentinels, or some nodes of the Cluster."""
    fleet: str = "default"
    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: bool = False
    tls_ca: str | None = None
    """File of the certificate authority; None for the system's authorities."""
    tls_cert: str | None = None
    tls_key: str | None = None
    sentinel_service: str = ""
    """Name of the service that the Sentinels watch; "" without Sentinel."""
    sentinel_password: str | None = None
    cluster: bool = False

    def __repr__(self) -> str:
        return f"RedisAddress({self})"

    def __str__(self) -> str:
        kind = "+cluster" if self.cluster else "+sentinel" if self.sentinel_service else ""
        scheme = f"{'rediss' if self.tls else 'redis'}{kind}"
        nodes = ",".join(f"{host}:{port}" for host, port in self.nodes)
        return f"{scheme}://{nodes}/{self.sentinel_service or self.db}?fleet={self.fleet}"

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse a URL. Raises ValueError, with what is wrong but without the password."""
        if not url.startswith(SCHEMES):
            raise ValueError(f"expected a URL that begins with one of {', '.join(SCHEMES)}")
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ValueError(f"not a URL: {_ENCODE}") from None
        if parts.fragment or "@" in parts.path:
            raise ValueError(f"unexpected # or @ after the host: {_ENCODE}")
        try:
            return cls._of(parts)
        except ValueError:
            if "@" in parts.query:  # so all of it may be a password
                raise ValueError(f"something is wrong before or after the ?: {_ENCODE}") from None
            raise

    @classmethod
    def _of(cls, parts: SplitResult) -> RedisAddress:
        scheme, _, kind = parts.scheme.partition("+")
        options = _options(parts.query)
        userinfo, _, hosts = parts.netloc.rpartition("@")
        username, has_password, password = userinfo.partition(":")
        default_port = _DEFAULT_SENTINEL_PORT if kind == "sentinel" else _DEFAULT_PORT
        service, db = _service_and_db(parts, kind)
        address = cls(
            nodes=tuple(_node(text, default_port) for text in hosts.split(",")),
            fleet=_fleet(options.get("fleet", "default")),
            username=unquote(username) or None,
            password=_password(unquote(password) if has_password else None, options),
            db=db,
            tls=scheme == "rediss",
            tls_ca=options.get("tls_ca"),
            tls_cert=options.get("tls_cert"),
            tls_key=options.get("tls_key"),
            sentinel_service=service,
            sentinel_password=options.get("sentinel_password"),
            cluster=kind == "cluster",
        )
        address._check(kind)
        return address

    def _check(self, kind: str) -> None:
        if not kind and len(self.nodes) > 1:
            raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
        if self.username and not self.password:
            raise ValueError("a user needs a password: redis://user:password@host")
        if self.sentinel_password and not self.sentinel_service:
            raise ValueError("sentinel_password needs redis+sentinel://")
        for name in ("tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is None:
                continue
            if not self.tls:
                raise ValueError(f"{name} needs rediss://, this URL does not use TLS")
            if not Path(path).is_file():
                raise ValueError(f"{name}: there is no file {path}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")


def _options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ValueError("after the ? goes name=value&name=value") from error
    for name, value in pairs:
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r}; there are {', '.join(_OPTIONS)}")
        if not value:
            raise ValueError(f"option {name!r} is empty")
    return dict(pairs)


def _node(text: str, default_port: int) -> tuple[str, int]:
    found = _NODE.fullmatch(text)
    if found is None:
        raise ValueError(f"expected host or host:port: {_ENCODE}")
    port = int(found["port"] or default_port)
    if not 0 < port < 65536:
        raise ValueError(f"port {port} is not between 1 and 65535")
    return found["v6"] or found["name"], port


def _service_and_db(parts: SplitResult, kind: str) -> tuple[str, int]:
    path = parts.path.strip("/").split("/") if parts.path.strip("/") else []
    service = ""
    if kind == "sentinel":
        if not path:
            raise ValueError("name the service the Sentinels watch: redis+sentinel://hosts/SERVICE")
        service = unquote(path.pop(0))
    if len(path) > 1 or (path and not path[0].isdecimal()):
        raise ValueError(f"expected a database number after the host, got {parts.path!r}")
    db = int(path[0]) if path else 0
    if kind == "cluster" and db:
        raise ValueError("a Redis Cluster has database 0 only")
    return service, db


def _fleet(name: str) -> str:
    if not _FLEET.fullmatch(name):
        raise ValueError(f"fleet must be 1 to 64 of A-Z a-z 0-9 _ . : -, got {name!r}")
    return name


def _password(given: str | None, options: dict[str, str]) -> str | None:
    path = options.get("password_file")
    if path is None:
        return given or None
    if given:
        raise ValueError("a password and a password_file: give one")
    try:
        text = Path(path).read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read password_file {path}: {error.strerror}") from error
    if not text:
        raise ValueError(f"password_file {path} is empty")
    return text
