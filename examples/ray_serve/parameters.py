"""The configuration of one replica, and the arguments of an application. No Ray is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def replica_name(application: str, deployment: str, rank: int) -> str:
    """Return the name of a replica in the fleet. The one that replaces it gets the same rank."""
    return re.sub(r"[^\w.-]", "-", f"{application}-{deployment}-{rank}")


def own_configuration(extra: Mapping[str, Any], name: str, address: str) -> dict[str, Any]:
    """Return the connector's configuration for the replica `name` on a node with this address.

    In a fleet it has a name and an address for its peers. Its SSD directory is in the configured
    one, where the others find it when the replica has died. Raises ValueError for a configured
    `worker_name`, which all replicas would have.
    """
    own = dict(extra)
    if own.get("directory"):
        if own.get("worker_name", name) != name:
            raise ValueError("worker_name: remove it, each replica gets a name of its own")
        own["worker_name"] = name
        own.setdefault("peer_host", address)
    if own.get("ssd_dir") and Path(own["ssd_dir"]).name != name:
        own["ssd_dir"] = str(Path(own["ssd_dir"]) / name)
    return own


def expand_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of Ray's builders, with variables and files read.

    A file is an engine's configuration that is given by its path. Raises ValueError for a
    configuration that is neither a path nor a mapping, and for a variable that is not set.
    """
    found: dict[str, Any] = expand_variables(args)
    for name in ("prefill_config", "decode_config"):
        if name in found:
            found[name] = _engine_config(found[name])
    if found.get("llm_configs"):
        found["llm_configs"] = [_engine_config(x) for x in found["llm_configs"]]
    return found


def _engine_config(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        given = expand_variables(yaml.safe_load(Path(given).read_text()))
    if not isinstance(given, dict):
        raise ValueError(
            "an engine's configuration is a mapping, or the path of a YAML file with one, "
            f"and not of type {type(given).__name__}"
        )
    return given


def engine_configs(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configurations of engines in the arguments of one of Ray's builders."""
    return list(args.get("llm_configs") or (args["prefill_config"], args["decode_config"]))


def expand_variables(value: Any) -> Any:
    """Return a copy of parsed YAML, with `$NAME` and `${NAME}` from the environment.

    Raises ValueError for a variable that is not set.
    """
    if isinstance(value, dict):
        return {key: expand_variables(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [expand_variables(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"\$(\w+)|\$\{(\w+)\}", _variable, value)
    return value


def _variable(found: re.Match[str]) -> str:
    name = found[1] or found[2]
    try:
        return os.environ[name]
    except KeyError:
        raise ValueError(f"the configuration needs the environment variable {name}") from None
