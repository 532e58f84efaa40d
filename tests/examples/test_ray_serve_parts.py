"""The parts of examples/ray_serve that need no Ray. `make test-ray` runs the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.ray_serve.parameters import (
    decode_parameters,
    engine_configs,
    expand_variables,
    own_configuration,
    prefill_parameters,
    replica_name,
)
from hetero_connector.config import HeteroConfig
from ownership.router.ray_serve.placing import replica_config

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


def test_the_client_s_parameters_reach_both_engines() -> None:
    given = {"expected_back_s": 5.0}
    assert prefill_parameters(given) == {
        "expected_back_s": 5.0,
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    answered = {"do_remote_prefill": True, "prefilled_tokens": 9, "remote_prefill_cached_tokens": 4}
    assert decode_parameters(given, answered) == {
        "expected_back_s": 5.0,
        "do_remote_prefill": True,
        "prefilled_tokens": 9,
    }
    assert given == {"expected_back_s": 5.0}


def test_without_an_answer_the_decoder_gets_the_client_s_parameters() -> None:
    assert decode_parameters({"session_id": "a"}, None) == {"session_id": "a"}
    assert decode_parameters(None, None) is None


def test_variables_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "m")
    assert expand_variables({"a": ["$MODEL", "x/${MODEL}/y", 3]}) == {"a": ["m", "x/m/y", 3]}
    monkeypatch.delenv("MODEL")
    with pytest.raises(ValueError, match="environment variable MODEL"):
        expand_variables("$MODEL")


@pytest.mark.parametrize("name", ["fleet", "prefill_decode"])
def test_a_file_configures_the_connector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "m")
    monkeypatch.setenv("DIRECTORY", "redis://127.0.0.1:6379")
    [application] = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())["applications"]
    assert application["import_path"] == "examples.ray_serve.app:build"
    args = expand_variables(application["args"])
    for config in engine_configs(args):
        router = config["deployment_config"]["request_router_config"]
        assert router["request_router_class"] == "ownership.router.ray_serve.router:OwnerRouter"
        assert replica_config(router["request_router_kwargs"]).directory.startswith("redis://")
        transfer = config["engine_kwargs"]["kv_transfer_config"]
        assert transfer["kv_connector"] == "HeteroConnector"
        extra = own_configuration(transfer["kv_connector_extra_config"], "app-0", "127.0.0.1")
        assert HeteroConfig.from_extra_config(extra).worker_name == "app-0"


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
