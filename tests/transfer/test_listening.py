"""The listening sockets of a process, and who can reach them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hetero_connector.transfer.nixl_peers import listening_addresses, only_this_host


def test_the_listening_sockets_of_this_process_and_no_others() -> None:
    before = set(listening_addresses(os.getpid()))
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
    ):
        client = socket.create_connection(one.getsockname())
        found = set(listening_addresses(os.getpid())) - before
        client.close()
        ports = one.getsockname()[1], two.getsockname()[1]
        assert found == {f"127.0.0.1:{ports[0]}", f"[::1]:{ports[1]}"}
    assert set(listening_addresses(os.getpid())) == before


def test_the_address_for_all_interfaces_is_listed(tmp_path: Path) -> None:
    fds, net = tmp_path / "7" / "fd", tmp_path / "7" / "net"
    fds.mkdir(parents=True)
    net.mkdir()
    (fds / "3").symlink_to("socket:[4711]")
    (fds / "4").symlink_to("/dev/null")
    line = "0: 00000000:1F90 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n"
    other = "1: 0100007F:0050 00000000:0000 0A 0:0 0:0 0 0 0 4712 1\n"
    (net / "tcp").write_text(f"head\n{line}{other}")
    (net / "tcp6").write_text("head\n")
    assert listening_addresses(7, tmp_path) == ["0.0.0.0:8080"]


@pytest.mark.parametrize(
    ("addresses", "is_only"),
    [
        ([], True),
        (["127.0.0.1:1", "[::1]:2"], True),
        (["127.0.0.1:1", "192.0.2.1:2"], False),
        (["0.0.0.0:1"], False),
        (["[::]:1"], False),
    ],
)
def test_only_loopback_addresses_are_closed_to_other_hosts(
    addresses: list[str], is_only: bool
) -> None:
    assert only_this_host(addresses) is is_only
