"""The parts of examples/ray_serve that need no Ray. `make test-ray` runs the rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from examples.ray_serve.parameters import (
    engine_configs,
    expand_arguments,
    expand_variables,
    own_configuration,
    replica_name,
)
from hetero_connector.config import HeteroConfig
from ownership.router.ray_serve.placing import replica_config
from ownership.router.ray_serve.replicas import told_in

EXAMPLE = Path(__file__).parents[2] / "examples/ray_serve"


def test_a_name_has_only_what_the_connector_takes() -> None:
    name = replica_name("chat app", "Prefill:Qwen/Qwen3-8B", 1)
    assert name == "chat-app-Prefill-Qwen-Qwen3-8B-1"


def test_a_replica_of_a_fleet_gets_name_address_and_directory_of_its_own() -> None:
    given = {"directory": "redis://host", "ssd_dir": "/ssd", "dram_gib": 2}
    own = own_configuration(given, "app-0", "10.0.0.1")
    assert own == {
        "directory": "redis://host",
        "worker_name": "app-0",
        "peer_host": "10.0.0.1",
        "ssd_dir": "/ssd/app-0",
        "dram_gib": 2,
    }
    assert given["ssd_dir"] == "/ssd"
    assert own_configuration(own, "app-0", "10.0.0.1") == own


def test_a_configured_address_stays_and_an_engine_alone_has_none() -> None:
    given = {"directory": "redis://host", "peer_host": "127.0.0.1"}
    assert own_configuration(given, "app-0", "10.0.0.1")["peer_host"] == "127.0.0.1"
    assert own_configuration({"dram_gib": 1}, "app-0", "10.0.0.1") == {"dram_gib": 1}


def test_one_name_for_all_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="worker_name: remove it"):
        own_configuration({"directory": "redis://host", "worker_name": "all"}, "app-0", "10.0.0.1")


def test_variables_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "m")
    assert expand_variables({"a": ["$MODEL", "x/${MODEL}/y", 3]}) == {"a": ["m", "x/m/y", 3]}
    monkeypatch.delenv("MODEL")
    with pytest.raises(ValueError, match="environment variable MODEL"):
        expand_variables("$MODEL")


@pytest.mark.parametrize("keys", [("llm_configs",), ("prefill_config", "decode_config")])
def test_an_engine_s_configuration_may_be_a_file(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", "m")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    file = tmp_path / "engine.yaml"
    file.write_text("model_loading_config: {model_id: $MODEL}")
    given = {key: ["$FOLDER/engine.yaml"] if key == "llm_configs" else str(file) for key in keys}
    [config, *_] = configs = engine_configs(expand_arguments(given))
    assert config == {"model_loading_config": {"model_id": "m"}}
    assert len(configs) == len(keys)


def test_an_engine_s_configuration_that_is_neither_a_file_nor_a_mapping_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "list.yaml").write_text("[a]")
    for wrong, kind in (
        (object(), "object"),
        (None, "NoneType"),
        (f"{tmp_path}/list.yaml", "list"),
    ):
        for given in ({"llm_configs": [wrong]}, {"prefill_config": wrong, "decode_config": {}}):
            with pytest.raises(ValueError, match=f"an engine's configuration .* type {kind}$"):
                expand_arguments(given)


@pytest.mark.parametrize("name", ["fleet", "prefill_decode"])
def test_a_file_configures_the_connector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "m")
    monkeypatch.setenv("DIRECTORY", "redis://127.0.0.1:6379")
    [application] = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())["applications"]
    assert application["import_path"] == "examples.ray_serve.app:build"
    args = expand_arguments(application["args"])
    for config in engine_configs(args):
        router = config["deployment_config"]["request_router_config"]
        assert router["request_router_class"] == "ownership.router.ray_serve.router:OwnerRouter"
        assert replica_config(router["request_router_kwargs"]).directory.startswith("redis://")
        transfer = config["engine_kwargs"]["kv_transfer_config"]
        assert transfer["kv_connector"] == "HeteroConnector"
        extra = own_configuration(transfer["kv_connector_extra_config"], "app-0", "127.0.0.1")
        assert HeteroConfig.from_extra_config(extra).worker_name == "app-0"


def test_a_replica_tells_its_costs_once_an_engine_has_told_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Base:
        async def record_routing_stats(self) -> dict[str, Any]:
            return {}

    internals = SimpleNamespace(
        TokenizeChatRequest=None, TokenizeCompletionRequest=None, config_of=None
    )
    for name, module in (
        ("ray.serve.llm.deployment", SimpleNamespace(LLMServer=Base)),
        ("examples.ray_serve.internals", internals),
    ):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    spec = spec_from_file_location("server", EXAMPLE / "server.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    told: list[dict[str, Any]] = []

    class Engines:
        async def ask(self, question: dict[str, str]) -> list[dict[str, Any]]:
            return told if question == {"get": "costs"} else []

    server = module.HeteroServer()
    server._engines, server._constant = Engines(), []

    def costs() -> list[Any]:
        answers = told_in(asyncio.run(server.record_routing_stats()))
        return [x.answer["engines"] for x in answers if x.path.endswith("costs")]

    assert costs() == [], "no engine is found"
    told = gone = [{"error": "engine 0: it is gone"}]
    assert costs() == []
    told = [{"costs": "first"}]
    assert costs() == [told]
    known, told = told, [{"costs": "second"}]
    assert costs() == [known], "each change is sent to everyone who routes"
    server._costs_s -= 2 * module._COSTS_S
    told = gone
    assert costs() == [known], "a good answer stays"


@pytest.mark.parametrize(
    ("version", "message"),
    [("2.59.0", "made for Ray 2.60.0 and found 2.59.0"), (None, "needs Ray: pip install")],
)
def test_a_missing_or_other_ray_is_named(tmp_path: Path, version: str | None, message: str) -> None:
    stub = "raise ImportError('none')" if version is None else f"__version__ = {version!r}"
    (tmp_path / "ray.py").write_text(stub)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import examples.ray_serve.internals"
    root = EXAMPLE.parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
