"""`python -m examples.ray_serve fleet`: Ray Serve LLM on this machine, without a GPU.

It starts Ray, an embedded Redis and the application of `fleet.yaml` or `prefill_decode.yaml` with a
small checkpoint, says where to send requests, and stops all of it on Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from examples.checkpoints import NAMES, write_checkpoint
from examples.embedded_redis import EmbeddedRedis
from examples.ray_serve.parameters import engine_configs
from examples.serving import engine_arguments, stop_servers_on_sigterm, use_engine_environment
from ownership.scheduling.registry import DEFAULT_POLICY

_HERE = Path(__file__).parent
_SMALL: dict[str, Any] = {
    "dram_gib": 0.25,
    "chunk_tokens": 256,
    # Computing so small a model is faster than reading its state.
    "planner": "always_load",
    "load_deadline_s": 100,  # a lookup gets 1 s of it: the machine may be busy
    "peer_host": "127.0.0.1",  # the DRAM tier is open to this machine only
}
"""Configuration of the connector for a small model on a busy machine."""
_CPUS = 8
"""Logical ones: Ray asks for one for each replica and for the ingress."""


def use_ray_environment(*, direct: bool) -> None:
    """Set what Ray reads when it is imported. `direct`: replicas stream to clients themselves."""
    use_engine_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",  # else it writes a token to the user's home directory
        RAY_SERVE_ENABLE_HA_PROXY=str(int(direct)),
        RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=str(int(direct)),
    )


def application(name: str, model: str, replicas: int, policy: str) -> dict[str, Any]:
    """Return the `args` of a YAML file, changed for a small model and a CPU."""
    parsed = yaml.safe_load((_HERE / f"{name}.yaml").read_text())
    args: dict[str, Any] = parsed["applications"][0]["args"]
    for config in engine_configs(args):
        config["placement_group_config"] = {"bundles": [{"CPU": 0.5}]}  # no GPU in it
        deployment = config["deployment_config"]
        deployment["num_replicas"] = replicas
        deployment["ray_actor_options"] = {"num_cpus": 0.5}
        deployment["request_router_config"]["request_router_kwargs"]["policy"] = policy
        engine = config["engine_kwargs"]
        engine.update(engine_arguments(model))
        engine["kv_transfer_config"]["kv_connector_extra_config"].update(_SMALL)
    return args


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.ray_serve", description=__doc__)
    parser.add_argument("name", choices=("fleet", "prefill_decode"))
    parser.add_argument("--model", choices=NAMES, default="dense", help="default: %(default)s")
    parser.add_argument("--replicas", type=int, help="default: two, with prefill_decode one each")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="router's; default: %(default)s")
    parser.add_argument("--direct", action="store_true", help="direct streaming from the replicas")
    parser.add_argument("--port", type=int, default=8000, help="metrics are at the next one")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="checkpoints")
    given = parser.parse_args()
    replicas = given.replicas or (2 if given.name == "fleet" else 1)
    use_ray_environment(direct=given.direct)
    import ray
    from ray import serve

    from examples.ray_serve.app import build

    checkpoint = write_checkpoint(given.model, given.dir.absolute() / "checkpoints")
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        # The names of its sockets must be short.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
        redis = stack.enter_context(EmbeddedRedis())
        os.environ.update(MODEL=str(checkpoint), DIRECTORY=redis.url)
        print(f"starting {given.name} with {given.model}, logs in {folder}", flush=True)
        stack.callback(ray.shutdown)
        ray.init(
            num_cpus=_CPUS,
            include_dashboard=False,
            object_store_memory=200 << 20,
            _temp_dir=folder,
            _metrics_export_port=given.port + 1,
        )
        stop_servers_on_sigterm()  # ray.init sets a handler that leaves everything behind
        stack.callback(serve.shutdown)
        serve.start(http_options={"host": "127.0.0.1", "port": given.port})
        args = application(given.name, given.model, replicas, given.policy)
        serve.run(build(args), name="heterocache")
        url = f"http://127.0.0.1:{given.port}"
        print(f"ready: {url}/v1, metrics at http://127.0.0.1:{given.port + 1}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
