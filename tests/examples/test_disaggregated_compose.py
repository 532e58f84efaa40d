"""The compose file, which cannot be run where there is no Docker: what can be checked of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.disaggregated_prefill import proxy
from hetero_connector.config import HeteroConfig
from ownership.open_directory import open_directory

ROOT = Path(proxy.__file__).parents[2]
COMPOSE = Path(proxy.__file__).parent / "docker-compose.yml"
SERVERS = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    given = {"REDIS_PASSWORD": "secret", "MODEL": "some/model"}
    text = re.sub(r"\$\{(\w+)(?::[-?][^}]*)?\}", lambda m: given.get(m[1], ""), COMPOSE.read_text())
    loaded = yaml.safe_load(text)
    assert loaded["networks"].keys() == {"fleet"}
    return dict(loaded["services"])


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_configured_as_the_connector_takes_it(
    services: dict[str, Any], name: str
) -> None:
    model, transfer = services[name]["command"]
    assert model == "--model=some/model"
    flag, _, value = transfer.partition("=")
    assert flag == "--kv-transfer-config"
    given = json.loads(value)
    assert given["kv_connector"] == "HeteroConnector"
    config = HeteroConfig.from_extra_config(given["kv_connector_extra_config"])
    assert config.worker_name == name
    assert config.directory.startswith("redis://:secret@redis:")
    open_directory(config.directory, deadline_s=1.0)
    assert "secret" in services["redis"]["command"]


def test_the_proxy_asks_the_servers_there_are(services: dict[str, Any]) -> None:
    command = services["proxy"]["command"]
    assert command[command.index("--prefill") + 1] == "http://prefill-0:8000"
    assert command[command.index("--decode") + 1] == "http://decode-0:8000"
    assert services["proxy"]["entrypoint"][-1] == proxy.__name__
    assert set(services["proxy"]["depends_on"]) == set(SERVERS) <= services.keys()
    assert services["proxy"]["ports"] == ["127.0.0.1:8000:8000"]
    assert "ports" not in services["redis"]


def test_the_image_is_built_from_what_is_there(services: dict[str, Any]) -> None:
    build = services["prefill-0"]["build"]
    context = Path(os.path.normpath(COMPOSE.parent / build["context"]))
    assert context == ROOT
    for line in re.findall(r"^COPY (.*) \S+$", build["dockerfile_inline"], re.MULTILINE):
        assert all((context / source).exists() for source in line.split())
