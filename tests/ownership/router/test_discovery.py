"""The sources of workers, when they cannot be read."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ownership.router.config import RouterConfig
from ownership.router.discovery import Discovery
from ownership.router.workers import WorkerSet

TOLD = "the workers stay as they are"


def discovery_of(config: RouterConfig) -> Discovery:
    any_session: Any = None
    return Discovery(config, WorkerSet(1), any_session)


def look(discovery: Discovery) -> None:
    for _ in range(3):
        asyncio.run(discovery.look())


def test_a_file_that_cannot_be_read_is_told_once_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "workers.yaml"
    discovery = discovery_of(replace(RouterConfig(), workers_file=file))
    look(discovery)
    assert caplog.text.count(f"{TOLD}: workers_file: ") == 1
    file.write_text("[]")
    look(discovery)
    file.unlink()
    look(discovery)
    assert caplog.text.count(TOLD) == 2


def test_a_name_without_an_address_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object, **more: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    look(discovery_of(replace(RouterConfig(), workers_dns="llm:8000")))
    assert caplog.text.count(f"{TOLD}: workers_dns: llm: ") == 1
