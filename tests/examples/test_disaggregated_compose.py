"""Checks of the compose file that need no Docker."""

from __future__ import annotations

import importlib
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from examples.disaggregated_prefill import proxy
from examples.serving import kv_transfer_config
from hetero_connector.config import HeteroConfig
from hetero_connector.supported_vllm import check_version
from ownership.directory.opening import open_directory
from ownership.directory.redis.address import RedisAddress

ROOT = Path(proxy.__file__).parents[2]
COMPOSE = Path(proxy.__file__).parent / "docker-compose.yml"
SERVERS = ("prefill-0", "decode-0")
GIVEN = {"REDIS_PASSWORD": "secret", "MODEL": "some/model"}
PORT = 8000
"""The default port of vLLM's server and of the proxy."""


def services_with(given: dict[str, str]) -> dict[str, Any]:
    return compose_services(COMPOSE, given)


def compose(path: Path, given: dict[str, str]) -> dict[str, Any]:
    """Return a file as Compose reads it: variables filled in, then YAML."""

    def value(match: re.Match[str]) -> str:
        name, how, word = match.groups()
        found = given.get(name, "")
        if found:
            return found
        assert how != ":?", f"{name} is not set"
        return word if how == ":-" else ""

    text = re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, path.read_text())
    loaded = yaml.safe_load(text)
    assert loaded["networks"].keys() == {"fleet"}
    return dict(loaded)


def compose_services(path: Path, given: dict[str, str]) -> dict[str, Any]:
    return dict(compose(path, given)["services"])


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return services_with(GIVEN)


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_configured_as_the_connector_takes_it(
    services: dict[str, Any], name: str
) -> None:
    assert services[name]["entrypoint"] == ["vllm", "serve"]
    model, transfer = services[name]["command"]
    assert model == "some/model"
    flag, _, value = transfer.partition("=")
    assert flag == "--kv-transfer-config"
    given = json.loads(value)
    extra = given["kv_connector_extra_config"]
    assert given == kv_transfer_config(extra), "what the example's script starts servers with"
    config = HeteroConfig.from_extra_config(extra)
    assert config.worker_name == name
    open_directory(config.directory, deadline_s=1.0)
    address = RedisAddress.parse(config.directory)
    ((host, port),) = address.nodes
    assert (host, port, address.password) == ("redis", 6379, "secret")
    assert host in services


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_vllm_takes_a_servers_command(services: dict[str, Any], name: str) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(services[name]["command"])
    assert (parsed.model_tag, parsed.port) == ("some/model", PORT)
    transfer = parsed.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("HeteroConnector", "kv_both")
    assert transfer.kv_connector_extra_config["worker_name"] == name


def test_the_two_servers_differ_in_their_names_and_gpus_alone(services: dict[str, Any]) -> None:
    def gpus(service: dict[str, Any]) -> list[str]:
        (devices,) = service.pop("deploy")["resources"]["reservations"]["devices"]
        assert devices.pop("capabilities") == ["gpu"]
        return list(devices["device_ids"])

    one, two = (dict(services[name]) for name in SERVERS)
    assert not set(gpus(one)) & set(gpus(two))
    one.pop("build")
    one["command"] = [part.replace("prefill-0", "decode-0") for part in one["command"]]
    assert one == two


def test_the_proxy_asks_the_servers_there_are(services: dict[str, Any]) -> None:
    service = services["proxy"]
    command = service["command"]
    for flag, name in (("--prefill", "prefill-0"), ("--decode", "decode-0")):
        url = urlsplit(command[command.index(flag) + 1])
        assert (url.scheme, url.hostname, url.port) == ("http", name, PORT)
        assert service["depends_on"][name] == {"condition": "service_healthy"}
        assert f":{PORT}/health" in services[name]["healthcheck"]["test"][-1]
    assert command[command.index("--host") + 1] == "0.0.0.0", "within its container"
    python, flag, module = service["entrypoint"]
    assert (python, flag) == ("python3", "-m")
    assert importlib.import_module(module) is proxy
    assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert not any("ports" in services[name] for name in ("redis", *SERVERS))
    assert all(service["networks"] == ["fleet"] for service in services.values())


def test_redis_keeps_nothing_and_asks_for_the_password(services: dict[str, Any]) -> None:
    redis = services["redis"]
    command = redis["command"]
    assert command[command.index("--requirepass") + 1] == "secret"
    assert command[command.index("--save") + 1] == ""
    assert redis["environment"] == {"REDISCLI_AUTH": "secret"}
    assert "PONG" in redis["healthcheck"]["test"][-1], "redis-cli ends well on NOAUTH, too"
    for name in SERVERS:
        assert services[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_a_password_must_be_given_and_a_model_may_be() -> None:
    with pytest.raises(AssertionError, match="REDIS_PASSWORD is not set"):
        services_with({})
    model = services_with({"REDIS_PASSWORD": "secret"})["decode-0"]["command"][0]
    assert model == "Qwen/Qwen3-8B"


def test_one_image_is_built_once_from_what_is_there(services: dict[str, Any]) -> None:
    builds = [service["build"] for service in services.values() if "build" in service]
    (build,) = builds
    ours = {services[name]["image"] for name in (*SERVERS, "proxy")}
    assert ours == {services["prefill-0"]["image"]}
    context = Path(os.path.normpath(COMPOSE.parent / build["context"]))
    assert context == ROOT
    dockerfile = build["dockerfile_inline"]
    copies = re.findall(r"^COPY (.*) (\S+)$", dockerfile, re.MULTILINE)
    sources = [source for names, _ in copies for source in names.split()]
    assert all((context / source).exists() for source in sources)
    for names, target in copies:
        if (context / names).is_dir():  # COPY takes what is in a directory, not the directory
            assert target == f"./{names}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in (project["readme"], *project["license-files"], "examples"):
        assert any(Path(needed).is_relative_to(source) for source in sources), needed
    extras = re.search(r"pip install .*'\.\[([\w,]+)\]'", dockerfile)
    assert extras is not None
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    image = re.search(r"^FROM vllm/vllm-openai:v(\S+)$", dockerfile, re.MULTILINE)
    assert image is not None
    check_version(image[1])
