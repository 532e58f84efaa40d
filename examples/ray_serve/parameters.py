"""The configuration of one replica, and the request parameters of a handoff. No Ray is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PREFILLERS_HITS = "remote_prefill_cached_tokens"
"""With this field of vLLM's, the usage of an answer reports the prefiller's hits, not all."""


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


def prefill_parameters(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `kv_transfer_params` for the prefiller: the client's, and that another decodes."""
    return {**(given or {}), "do_remote_decode": True, "do_remote_prefill": False}


def decode_parameters(
    given: Mapping[str, Any] | None, answered: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return `kv_transfer_params` for the decoder: the client's, and the prefiller's answer."""
    merged = {**(given or {}), **(answered or {})}
    merged.pop(_PREFILLERS_HITS, None)
    return merged or None


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
