"""Builds the application that a YAML file describes."""

from __future__ import annotations

from typing import Any

from ray.serve.llm import build_openai_app, build_pd_openai_app

from examples.ray_serve.backend import register_backend
from examples.ray_serve.parameters import expand_variables


def build(args: dict[str, Any]) -> Any:
    """Return the application for the `args` of Ray's own builders.

    With `prefill_config` and `decode_config` they go to `build_pd_openai_app`, with `llm_configs`
    to `build_openai_app`. Both find our backend, which this registers first.
    """
    register_backend()
    expanded = expand_variables(args)
    builder = build_pd_openai_app if "prefill_config" in expanded else build_openai_app
    return builder(expanded)
