"""Builds the application that a YAML file describes."""

from __future__ import annotations

from typing import Any

from ray.serve.llm import build_openai_app, build_pd_openai_app

from examples.ray_serve.backend import register_backend
from examples.ray_serve.parameters import engine_configs, expand_arguments
from ownership.router.ray_serve.placing import replica_config

ROUTER = "ownership.router.ray_serve.router:OwnerRouter"


def build(args: dict[str, Any]) -> Any:
    """Return the application for the `args` of Ray's own builders.

    With `prefill_config` and `decode_config` they go to `build_pd_openai_app`, with `llm_configs`
    to `build_openai_app`. Both find our backend, which this registers first. Raises
    RouterConfigError for wrong arguments of a router, which Ray would only log later, and
    ValueError for an engine's configuration that is neither a mapping nor the path of a YAML file.
    """
    register_backend()
    expanded = expand_arguments(args)
    for config in engine_configs(expanded):
        router = config.get("deployment_config", {}).get("request_router_config", {})
        if router.get("request_router_class") == ROUTER:
            replica_config(router.get("request_router_kwargs", {}))
    builder = build_pd_openai_app if "prefill_config" in expanded else build_openai_app
    return builder(expanded)
