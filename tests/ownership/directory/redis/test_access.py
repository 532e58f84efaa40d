"""Passwords, users, certificates and versions: who gets in, and the errors for all others."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import trustme

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.errors import DirectoryRefusedError, DirectoryUnavailableError
from ownership.directory import GrantOutcome
from ownership.directory.redis import RedisDirectory
from ownership.directory.redis.scripts import fleet_key
from tests.ownership.fleet_bench import KV, artifact, claim, join
from tests.ownership.redis_bench import new_fleet, shared_server
from tests.ownership.tls_proxy import TlsProxy

DEADLINE_S = 20.0


def refused(url: str) -> str:
    """Return the error of a worker that tries to register."""
    directory = RedisDirectory(url, deadline_s=DEADLINE_S)
    with pytest.raises(DirectoryRefusedError) as told:
        join(directory, "ann")
    directory.close()
    return str(told.value)


class TestPasswords:
    def test_a_wrong_or_missing_password_is_reported_and_never_printed(self) -> None:
        port = shared_server().port
        for secret in (":open-sesame@", ""):
            told = refused(f"redis://{secret}127.0.0.1:{port}")
            assert "wrong user or password" in told
            assert f"127.0.0.1:{port}" in told
            assert "sesame" not in told

    def test_a_user_with_rights_to_one_fleet_has_no_other(self) -> None:
        admin = redis.Redis.from_url(shared_server().url)
        fleet = new_fleet()
        admin.acl_setuser(
            "ann", enabled=True, passwords=["+hush"], categories=["+@all"],
            keys=[fleet_key(fleet, "*")],
        )  # fmt: skip
        url = f"redis://ann:hush@127.0.0.1:{shared_server().port}"
        directory = RedisDirectory(f"{url}?fleet={fleet}", deadline_s=DEADLINE_S)
        lease = join(directory, "ann")
        assert claim(directory, lease, artifact())[0].outcome is GrantOutcome.OWNED
        assert "may not run scripts on this fleet's keys" in refused(f"{url}?fleet=others")
        assert "wrong user or password" in refused(url.replace("hush", "loud"))
        admin.acl_deluser("ann")

    def test_two_fleets_do_not_see_each_other(self) -> None:
        first, second = (
            RedisDirectory(f"{shared_server().url}?fleet={new_fleet()}", deadline_s=DEADLINE_S)
            for _ in range(2)
        )
        claim(first, join(first, "ann"), artifact())
        assert KV in first.lookup([artifact().chunk]).chunks[0]
        assert second.lookup([artifact().chunk]).chunks[0] == {}
        assert second.workers() == {}


class TestVersions:
    def test_a_fleet_of_another_format_is_left_alone(self) -> None:
        fleet = new_fleet()
        client = redis.Redis.from_url(shared_server().url)
        client.hset(fleet_key(fleet, "fleet"), "format", "2")
        told = refused(f"{shared_server().url}?fleet={fleet}")
        assert "format 2" in told
        assert "?fleet=NAME" in told
        assert client.hgetall(fleet_key(fleet, "fleet")) == {b"format": b"2"}


class TestTls:
    @pytest.fixture(scope="class")
    def authority(self) -> trustme.CA:
        return trustme.CA()

    @pytest.fixture
    def ca_file(self, authority: trustme.CA, tmp_path: Path) -> Path:
        path = tmp_path / "ca.pem"
        authority.cert_pem.write_to_path(path)
        return path

    @pytest.fixture
    def proxy(self, authority: trustme.CA) -> Iterator[TlsProxy]:
        with served_by(authority.issue_cert("127.0.0.1")) as running:
            yield running

    def test_a_certificate_of_the_named_authority(self, proxy: TlsProxy, ca_file: Path) -> None:
        url = f"{tls_url(proxy)}?tls_ca={ca_file}&fleet={new_fleet()}"
        directory = RedisDirectory(url, deadline_s=DEADLINE_S)
        lease = join(directory, "ann")
        assert claim(directory, lease, artifact())[0].outcome is GrantOutcome.OWNED
        directory.close()

    def test_a_certificate_of_an_unknown_authority(self, proxy: TlsProxy) -> None:
        told = refused(tls_url(proxy))
        assert "certificate is not valid" in told
        assert "tls_ca=FILE" in told

    def test_a_certificate_for_another_host(self, authority: trustme.CA, ca_file: Path) -> None:
        with served_by(authority.issue_cert("elsewhere.example")) as proxy:
            told = refused(f"{tls_url(proxy)}?tls_ca={ca_file}")
        assert "certificate is not valid" in told
        assert "127.0.0.1" in told

    def test_a_certificate_that_has_expired(self, authority: trustme.CA, ca_file: Path) -> None:
        past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
        with served_by(authority.issue_cert("127.0.0.1", not_after=past)) as proxy:
            assert "expired" in refused(f"{tls_url(proxy)}?tls_ca={ca_file}")

    def test_tls_to_a_server_without(self) -> None:
        url = shared_server().url.replace("redis://", "rediss://")
        directory = RedisDirectory(url, deadline_s=2.0)
        with pytest.raises((DirectoryRefusedError, DirectoryUnavailableError)):
            join(directory, "ann")

    def test_no_tls_to_a_server_with(self, proxy: TlsProxy) -> None:
        directory = RedisDirectory(tls_url(proxy).replace("rediss://", "redis://"), deadline_s=2.0)
        with pytest.raises(DirectoryUnavailableError):
            join(directory, "ann")

    def test_a_client_certificate_where_the_server_asks_for_one(
        self, authority: trustme.CA, ca_file: Path, tmp_path: Path
    ) -> None:
        mine = authority.issue_cert("ann@fleet.example")
        mine.private_key_pem.write_to_path(tmp_path / "key.pem")
        for pem in mine.cert_chain_pems:
            pem.write_to_path(tmp_path / "cert.pem", append=True)
        with served_by(authority.issue_cert("127.0.0.1"), authority) as proxy:
            url = f"{tls_url(proxy)}?tls_ca={ca_file}&fleet={new_fleet()}"
            certificate = f"&tls_cert={tmp_path / 'cert.pem'}&tls_key={tmp_path / 'key.pem'}"
            directory = RedisDirectory(url + certificate, deadline_s=DEADLINE_S)
            assert join(directory, "ann").epoch > 0
            directory.close()
            without = RedisDirectory(url, deadline_s=2.0)
            with pytest.raises((DirectoryRefusedError, DirectoryUnavailableError)):
                join(without, "bob")


def served_by(certificate: trustme.LeafCert, clients: trustme.CA | None = None) -> TlsProxy:
    """The shared server behind TLS; `clients`: who must have signed the client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        clients.configure_trust(context)
    return TlsProxy(context, shared_server().port)


def tls_url(proxy: TlsProxy) -> str:
    server: EmbeddedRedis = shared_server()
    return f"rediss://:{server.password}@127.0.0.1:{proxy.port}"
