from __future__ import annotations

from pathlib import Path

import pytest

from ownership.directory.redis import RedisAddress


def test_one_server_with_the_defaults() -> None:
    address = RedisAddress.parse("redis://cache")
    assert address == RedisAddress(nodes=(("cache", 6379),))
    assert address.fleet == "default"


def test_user_password_database_and_fleet() -> None:
    address = RedisAddress.parse("redis://ann:p%40ss%2F@[::1]:7000/3?fleet=prod.eu-1")
    assert address.nodes == (("::1", 7000),)
    assert (address.username, address.password, address.db) == ("ann", "p@ss/", 3)
    assert address.fleet == "prod.eu-1"


def test_a_password_alone_and_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush\n")
    assert RedisAddress.parse("redis://:hush@cache").password == "hush"
    assert RedisAddress.parse(f"redis://cache?password_file={secret}").password == "hush"


def test_sentinel_and_cluster_take_several_hosts(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    sentinel = RedisAddress.parse("redis+sentinel://:x@a:1,b/primary/2?sentinel_password=y")
    assert sentinel.nodes == (("a", 1), ("b", 26379))
    assert (sentinel.sentinel_service, sentinel.db) == ("primary", 2)
    assert sentinel.sentinel_password == "y"
    cluster = RedisAddress.parse(f"rediss+cluster://a,b:7/?tls_ca={ca}")
    assert cluster.cluster
    assert cluster.tls
    assert cluster.nodes == (("a", 6379), ("b", 7))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://cache", "begins with one of"),
        ("redis://", "host or host:port"),
        ("redis://cache:0", "port 0"),
        ("redis://cache:99999", "port 99999"),
        ("redis://a,b", "redis\\+sentinel:// or redis\\+cluster://"),
        ("redis://cache/x", "database number"),
        ("redis://cache/1/2", "database number"),
        ("redis+sentinel://a", "name the service"),
        ("redis+cluster://a/1", "database 0 only"),
        ("redis://cache?flet=a", "unknown option 'flet'"),
        ("redis://cache?fleet=", "empty"),
        ("redis://cache?fleet=a{b}", "fleet must be"),
        ("redis://cache?fleet", "name=value"),
        ("redis://ann@cache", "needs a password"),
        ("redis://cache?tls_ca=/etc/hosts", "needs rediss"),
        ("rediss://cache?tls_ca=/no/such/file", "there is no file"),
        ("rediss://cache?tls_cert=/etc/hosts", "go together"),
        ("redis://cache?password_file=/no/such/file", "cannot read"),
        ("redis://:hush@cache?password_file=/etc/hosts", "give one"),
        ("redis://cache?sentinel_password=x", "needs redis\\+sentinel"),
    ],
)
def test_a_bad_url_is_explained(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RedisAddress.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://ann:hush@cache/1",
        "rediss+sentinel://:hush@a,b/primary?sentinel_password=hush",
        "redis+cluster://:hush@a,b",
    ],
)
def test_no_secret_is_printed(url: str) -> None:
    address = RedisAddress.parse(url)
    assert "hush" not in f"{address} {address!r}"
    assert str(address).startswith(url.partition("://")[0])


def test_an_error_repeats_no_password() -> None:
    with pytest.raises(ValueError, match="host or host:port") as told:
        RedisAddress.parse("redis://ann:hush@cache:x")
    assert "hush" not in str(told.value)


@pytest.mark.parametrize("mark", "/?#")
@pytest.mark.parametrize("before", ["ann:", ":", ":1", "cache:1", ":[", ":\u2100"])
@pytest.mark.parametrize("after", ["hush", "hush=x", "fleet=hush", "@hush"])
def test_a_part_of_a_password_is_never_printed(mark: str, before: str, after: str) -> None:
    """Even if it has characters that end a host, so that it looks like a path or an option."""
    with pytest.raises(ValueError, match="percent-encode") as told:
        RedisAddress.parse(f"redis://{before}hu{mark}{after}@cache")
    assert "hu" not in str(told.value)
    assert told.value.__cause__ is None
    assert told.value.__suppress_context__ or told.value.__context__ is None


def test_the_last_at_sign_ends_a_password() -> None:
    address = RedisAddress.parse("redis://:hu@sh@cache")
    assert (address.password, address.nodes) == ("hu@sh", (("cache", 6379),))


def test_an_option_may_have_an_at_sign(tmp_path: Path) -> None:
    secret = tmp_path / "a@b"
    secret.write_text("hush")
    assert RedisAddress.parse(f"redis://cache?password_file={secret}").password == "hush"
    with pytest.raises(ValueError, match="percent-encode"):
        RedisAddress.parse(f"redis://cache?password_file={secret}.none")
