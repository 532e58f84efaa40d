"""Image, compose file, Helm values and Kustomize patch, as far as can be checked without Docker."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hetero_connector.config import HeteroConfig
from hetero_connector.supported_vllm import check_version
from ownership.directory.redis.address import RedisAddress
from ownership.router.config import RouterConfig, read_config
from scripts.make_dashboard import DASHBOARDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GIVEN = {"REDIS_PASSWORD": "secret", "GRAFANA_PASSWORD": "other", "MODEL": "some/model"}
SERVERS = ("vllm-0", "vllm-1")
TAG = "v0.33.0"


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


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
    return compose_services(DEPLOY / "compose.yaml", GIVEN)


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "helm/production-stack.yaml").read_text()))


def patch() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kustomize/llm-d/patch-vllm.yaml").read_text()))


def transfer_config(arguments: list[str], password: str) -> dict[str, Any]:
    """Check the connector's configuration in a server's arguments, and return its own part."""
    flags = [x for x in arguments if x.startswith("--kv-transfer-config")]
    assert len(flags) == 1
    _, _, joined = flags[0].partition("=")
    transfer = json.loads(joined or arguments[arguments.index(flags[0]) + 1])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("HeteroConnector", "kv_both")
    extra: dict[str, Any] = transfer["kv_connector_extra_config"]
    address = RedisAddress.parse(extra["directory"].replace("$(REDIS_PASSWORD)", password))
    assert (address.nodes[0], address.password) == (("redis", 6379), password)
    return extra


def is_accepted(extra: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> HeteroConfig:
    """Check it as an engine does, on a machine with enough memory and disk."""
    from hetero_connector import config, machine

    plenty = replace(machine.memory(), total_bytes=1 << 40)
    monkeypatch.setattr(config.machine, "memory", lambda: plenty)
    monkeypatch.setattr(config, "ssd_gib_of", lambda given, directory: given)
    return HeteroConfig.from_extra_config(extra)


# --- The image ------------------------------------------------------------------------------------


def test_the_image_has_every_package_of_the_wheel(tmp_path: Path) -> None:
    """Build from what the Dockerfile copies, and from nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    for names, target in re.findall(r"^ *COPY (?!--from)(.*) (\S+)$", dockerfile(), re.MULTILINE):
        for name in names.split():
            if (ROOT / name).is_dir():
                assert target == f"./{name}"
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / name, source / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {x for x in zipfile.ZipFile(wheel).namelist() if x.endswith(".py")}
    folders = {"hetero_connector": ROOT, "ownership": ROOT, "heterocache_cuda": ROOT / "cuda"}
    expected = {
        path.relative_to(parent).as_posix()
        for name, parent in folders.items()
        for path in (parent / name).rglob("*.py")
    }
    assert packed == expected


def test_the_image_is_of_a_vllm_that_is_supported() -> None:
    (version,) = re.findall(r"^ARG VLLM_VERSION=v(\S+)$", dockerfile(), re.MULTILINE)
    check_version(version)
    assert f"v{version}" == TAG
    assert "[nixl,router]" in dockerfile(), "the router's extra has what Redis needs"


def test_docker_sends_no_more_than_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        name
        for names in re.findall(r"^ *COPY (?!--from)(.*) \S+$", dockerfile(), re.MULTILINE)
        for name in names.split()
    }
    assert copied == sent


# --- Compose --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_of_compose_is_configured_as_the_connector_takes_it(
    services: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services[name]
    extra = transfer_config(service["command"], "secret")
    assert is_accepted(extra, monkeypatch).worker_name == name
    assert any(volume.endswith(":/kv") for volume in service["volumes"])
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_redis_of_compose_keeps_nothing_and_asks_for_the_password(services: dict[str, Any]) -> None:
    redis = services["redis"]
    command = redis["command"]
    assert command[command.index("--requirepass") + 1] == "secret"
    assert command[command.index("--save") + 1] == ""
    assert redis["environment"] == {"REDISCLI_AUTH": "secret"}
    assert "PONG" in redis["healthcheck"]["test"][-1], "redis-cli ends well on NOAUTH, too"


def test_each_server_has_an_ssd_directory_a_gpu_and_a_port_of_its_own(
    services: dict[str, Any],
) -> None:
    def own(service: dict[str, Any]) -> list[str]:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        kept = [x for x in service["volumes"] if x.endswith(":/kv")]
        return [*kept, *device["device_ids"], *service["ports"]]

    one, two = (own(services[name]) for name in SERVERS)
    assert not set(one) & set(two)


def test_the_router_of_compose_is_configured_as_it_takes_it(
    services: dict[str, Any], tmp_path: Path
) -> None:
    router = services["router"]
    (mounted,) = router["configs"]
    assert router["entrypoint"] == ["heterocache", "router", "--config", mounted["target"]]
    path = tmp_path / "fleet.yaml"
    content = compose(DEPLOY / "compose.yaml", GIVEN)["configs"][mounted["source"]]["content"]
    path.write_text(content)
    config = read_config(path)
    assert [worker.name for worker in config.workers] == list(SERVERS)
    assert config.model_path == services["vllm-0"]["command"][0]
    assert transfer_config(services["vllm-0"]["command"], "secret")["directory"] == config.directory
    assert router["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    # The router downloads nothing: a healthy server has the model's files in the shared volume.
    assert router["depends_on"]["vllm-0"] == {"condition": "service_healthy"}
    assert set(router["volumes"]) < set(services["vllm-0"]["volumes"])
    for name in SERVERS:
        assert services[name]["environment"]["VLLM_PLUGINS"] == "heterocache"


def test_what_serves_is_started_again_when_it_ends(services: dict[str, Any]) -> None:
    for name in ("redis", *SERVERS, "router"):
        assert services[name]["restart"] == "unless-stopped"


def test_the_default_models_are_ones_that_hugging_face_gives_to_everyone() -> None:
    given = {name: value for name, value in GIVEN.items() if name != "MODEL"}
    command = compose_services(DEPLOY / "compose.yaml", given)["vllm-0"]["command"]
    (model,) = values()["servingEngineSpec"]["modelSpec"]
    assert {model["modelURL"], command[0]} == {"Qwen/Qwen3-8B"}


def test_envoy_waits_for_room_and_for_a_prefill() -> None:
    (given,) = re.findall(r"message_timeout: (\d+)s", (DEPLOY / "envoy/envoy.yaml").read_text())
    assert int(given) > RouterConfig.queue_s + RouterConfig.silent_s


def test_containers_are_given_more_time_to_stop_than_vllm(services: dict[str, Any]) -> None:
    """Without the option vLLM kills an engine at once, before it has written its state."""

    def timeout_s(arguments: list[str]) -> int:
        (found,) = [x for x in arguments if x.startswith("--shutdown-timeout=")]
        return int(found.partition("=")[2])

    for name in SERVERS:
        assert services[name]["stop_grace_period"] == "2m"
        assert 30 <= timeout_s(services[name]["command"]) < 120
    (model,) = values()["servingEngineSpec"]["modelSpec"]
    assert timeout_s(model["vllmConfig"]["extraArgs"]) < 30, "Kubernetes' own default"
    (container,) = patch()["spec"]["template"]["spec"]["containers"]
    assert timeout_s(container["args"]) < 130, "that of llm-d's guide"


def test_prometheus_scrapes_every_server_and_grafana_asks_it(services: dict[str, Any]) -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    scraped = {
        job["job_name"]: config["targets"]
        for job in prometheus["scrape_configs"]
        for config in job["static_configs"]
    }
    assert scraped == {"vllm": [f"{name}:8000" for name in SERVERS], "router": ["router:8080"]}
    mounted = {target for _, target in mounts(services["prometheus"])}
    assert set(prometheus["rule_files"]) < mounted
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (folder,) = yaml.safe_load((provisioning / "dashboards/heterocache.yaml").read_text())[
        "providers"
    ]
    assert {f"{folder['options']['path']}/{board.path.name}" for board in DASHBOARDS} < {
        target for _, target in mounts(services["grafana"])
    }


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Return source and target of the files that are mounted from the repository."""
    split = [volume.split(":")[:2] for volume in service["volumes"]]
    return [(source, target) for source, target in split if source.startswith("./")]


def test_what_is_mounted_exists_and_nothing_is_open_to_other_hosts(
    services: dict[str, Any],
) -> None:
    for service in services.values():
        for source, _ in mounts({"volumes": service.get("volumes", [])}):
            assert (DEPLOY / source).exists()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["networks"] == ["fleet"]
    assert "ports" not in services["redis"]


@pytest.mark.parametrize("missing", ["REDIS_PASSWORD", "GRAFANA_PASSWORD"])
def test_compose_asks_for_each_password(missing: str) -> None:
    given = {name: value for name, value in GIVEN.items() if name != missing}
    with pytest.raises(AssertionError, match=f"{missing} is not set"):
        compose_services(DEPLOY / "compose.yaml", given)


# --- Kubernetes -----------------------------------------------------------------------------------


def test_the_helm_values_are_those_of_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json.loads((Path(__file__).parent / "production-stack.schema.json").read_text())
    jsonschema.validate(values(), schema)
    engine = schema["properties"]["servingEngineSpec"]["properties"]
    known = engine["modelSpec"]["items"]["properties"]
    (model,) = values()["servingEngineSpec"]["modelSpec"]
    assert values()["servingEngineSpec"].keys() <= engine.keys()
    assert model.keys() <= known.keys()
    assert model["vllmConfig"].keys() <= known["vllmConfig"]["properties"].keys()
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert model["tag"] == TAG
    # Events have the tokens of all prompts, and nothing in the chart reads them.
    assert "--kv-events-config" not in model["vllmConfig"]["extraArgs"]
    extra = transfer_config(model["vllmConfig"]["extraArgs"], "secret")
    config = is_accepted(extra, monkeypatch)
    check_pod(config, extra, model["env"], model["extraVolumeMounts"], model["extraVolumes"])


def test_the_patch_of_llm_d_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = patch()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["vllm", "serve"]
    extra = transfer_config(container["args"], "secret")
    config = is_accepted(extra, monkeypatch)
    check_pod(config, extra, container["env"], container["volumeMounts"], pod["volumes"])
    component = yaml.safe_load((DEPLOY / "kustomize/llm-d/kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    (image,) = component["images"]
    assert (image["name"], image["newTag"]) == ("vllm/vllm-openai", TAG)
    (named,) = component["patches"]
    assert (DEPLOY / "kustomize/llm-d" / named["path"]).exists()
    events = json.loads(container["args"][container["args"].index("--kv-events-config") + 1])
    assert events["topic"].endswith(f"@{container['args'][0]}")


def check_pod(
    config: HeteroConfig,
    extra: Mapping[str, Any],
    env: list[dict[str, Any]],
    volume_mounts: list[dict[str, Any]],
    volumes: list[dict[str, Any]],
) -> None:
    """Check that what the configuration names is in the pod."""
    assert "$(REDIS_PASSWORD)" in extra["directory"], "a password stands in no manifest"
    names = {x["name"]: x for x in env}
    assert "secretKeyRef" in names["REDIS_PASSWORD"]["valueFrom"]
    assert "UCX_NET_DEVICES" in names
    assert config.ssd_dir is not None
    (mount,) = [x for x in volume_mounts if config.ssd_dir.is_relative_to(x["mountPath"])]
    (volume,) = [x for x in volumes if x["name"] == mount["name"]]
    limit = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    assert 1.05 * extra["ssd_gib"] < limit, "the kubelet evicts a pod whose volume is over it"
