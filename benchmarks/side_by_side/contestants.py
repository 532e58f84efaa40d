"""The contestants: what each needs, and how it is started as its documentation says."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.environments import Environment
from benchmarks.side_by_side.processes import ServiceCommand
from examples.serving import Server, kv_transfer_config

MEMORY_GIB = 2
"""The memory that every contestant may fill."""
DISK_GIB = 4


@dataclass(frozen=True)
class Place:
    """The folder, environment and ports of one running contestant."""

    folder: Path
    """For what it keeps in files. It is the only thing that survives a stop of all processes."""
    environment: Environment
    ports: Sequence[int]
    """Free TCP ports."""
    chunk_tokens: int = 256
    """For LMCache, whose default this is; whole blocks of the engine."""


def _nothing(place: Place) -> dict[str, str]:
    return {}


def _no_services(place: Place) -> list[ServiceCommand]:
    return []


def _unknown(place: Place, server: Server) -> int | None:
    return None


def _bytes_in_files(place: Place, server: Server) -> int | None:
    """Return the size of all files in the folder."""
    return sum(path.stat().st_size for path in place.folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Contestant:
    """One way to keep KV state, as a user would set it up."""

    name: str
    transfer: Callable[[Place], dict[str, Any] | None]
    """Returns the `--kv-transfer-config`; None for a server without a connector."""
    pins: tuple[str, ...] = ()
    """The packages that pip installs for it, besides vLLM."""
    environment: str = ""
    """The contestant whose environment it uses, with the same pins; its own if empty."""
    debian: tuple[str, ...] = ()
    """Debian packages whose shared libraries it needs."""
    services: Callable[[Place], list[ServiceCommand]] = _no_services
    """Returns the processes that it needs besides the engine, in their order of start."""
    variables: Callable[[Place], dict[str, str]] = _nothing
    """Returns environment variables of engine and services."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    stored_bytes: Callable[[Place, Server], int | None] = _unknown
    """Returns the bytes that it has stored; None if it does not say."""
    has_files: bool = False
    """True if it keeps state in files of its folder."""
    has_prefiller: bool = False
    """True if a second engine computes prompts, and this one takes their state from it."""
    is_rival: bool = True

    @property
    def version(self) -> str:
        """The package that has it, with its version."""
        return " ".join(self.pins[:1]) or f"vllm=={version('vllm')}"


def _heterocache(place: Place) -> dict[str, Any]:
    return kv_transfer_config(
        {"dram_gib": MEMORY_GIB, "ssd_dir": str(place.folder), "ssd_gib": DISK_GIB}
    )


def _saved_bytes(place: Place, server: Server) -> int | None:
    series = server.series("heterocache_saved_bytes_total")
    return int(sum(value for _, value in series))


def _config(connector: str, extra: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return kv_transfer_config(extra, kv_connector=connector, **fields)


_LMCACHE = (
    *("lmcache==0.5.6", "sortedcontainers==2.4.0", "aiofile==3.12.3", "caio==0.12.10"),
    *("aiofiles==25.1.0", "blake3==1.0.11", "msgspec==0.22.0", "nvtx==0.2.17"),
    *("redis==8.1.0", "cachetools==8.0.2", "py-cpuinfo==9.0.0", "psutil==7.2.2"),
    *("opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2"),
    *("opentelemetry-exporter-prometheus==0.66b2",),
    *("opentelemetry-semantic-conventions==0.66b2",),
)


def _lmcache_variables(place: Place) -> dict[str, str]:
    return {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}


def _lmcache_in_process_variables(place: Place) -> dict[str, str]:
    return _lmcache_variables(place) | {
        "LMCACHE_CHUNK_SIZE": str(place.chunk_tokens),
        "LMCACHE_LOCAL_CPU": "true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(MEMORY_GIB),
        "LMCACHE_LOCAL_DISK": f"file://{place.folder}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": str(DISK_GIB),
    }


def _lmcache_server(place: Place) -> list[ServiceCommand]:
    port, http, prometheus = place.ports[:3]
    command = [str(place.environment.bin / "lmcache"), "server", "--port", str(port)]
    command += ["--http-port", str(http), "--prometheus-port", str(prometheus)]
    command += ["--chunk-size", str(place.chunk_tokens)]
    command += ["--l1-size-gb", str(MEMORY_GIB), "--eviction-policy", "LRU"]
    command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(place.folder)})]
    return [ServiceCommand(command, http)]


def _lmcache(place: Place) -> dict[str, Any]:
    # The other transfer modes wait without end for a GPU.
    return _config(
        "LMCacheMPConnector",
        {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": place.ports[0],
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    )


def _mooncake_master(place: Place) -> list[ServiceCommand]:
    rpc, metrics = place.ports[:2]
    command = [str(place.environment.bin / "mooncake_master"), "--port", str(rpc)]
    return [ServiceCommand([*command, f"--metrics_port={metrics}"], rpc)]


def _mooncake_variables(place: Place) -> dict[str, str]:
    path = place.folder.parent / "mooncake.json"
    config = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{place.ports[0]}",
        "global_segment_size": f"{MEMORY_GIB}GB",
        "local_buffer_size": "1GB",
        "protocol": "tcp",
        "device_name": "",
    }
    path.write_text(json.dumps(config))
    return {"MOONCAKE_CONFIG_PATH": str(path), "PYTHONHASHSEED": "0"}


def _mooncake_bytes(place: Place, server: Server) -> int | None:
    url = f"http://127.0.0.1:{place.ports[1]}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("master_allocated_bytes "):
                return int(float(line.split()[-1]))
    return None


def _pegaflow_server(place: Place) -> list[ServiceCommand]:
    port, http = place.ports[:2]
    command = [str(place.environment.bin / "pegaflow-server"), "--addr", f"127.0.0.1:{port}"]
    command += ["--http-addr", f"127.0.0.1:{http}", "--pool-size", f"{MEMORY_GIB}gb"]
    return [ServiceCommand(command, port)]


def _pegaflow(place: Place) -> dict[str, Any]:
    return _config(
        "PegaKVConnector",
        {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": place.ports[0]},
        kv_connector_module_path="pegaflow.connector",
    )


def _nixl_variables(place: Place) -> dict[str, str]:
    # With UCX's own choice the engines' handshake is not answered in time on two cores.
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.ports[0]), "UCX_TLS": "tcp,self,sm"}


_NIXL = {"kv_lease_duration": 300}
"""Seconds. With the default, 30, a prefiller on two cores drops state before it is asked for it."""


CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant("none", lambda place: None, is_rival=False),
        Contestant(
            "heterocache",
            _heterocache,
            stored_bytes=_saved_bytes,
            has_files=True,
            is_rival=False,
        ),
        Contestant(
            "example",
            lambda place: _config(
                "ExampleConnector", {"shared_storage_path": str(place.folder)}
            ),
            # It saves a prompt only if one step computes all of it. Next to it vLLM treats windows
            # as full attention, and refuses an interval at which windows are kept.
            engine_args={"max_num_batched_tokens": 8448, "prefix_cache_retention_interval": 0},
            stored_bytes=_bytes_in_files,
            has_files=True,
        ),
        Contestant(
            "lmcache",
            _lmcache,
            pins=_LMCACHE,
            services=_lmcache_server,
            stored_bytes=_bytes_in_files,
            variables=_lmcache_variables,
            has_files=True,
        ),
        Contestant(
            "lmcache_in_process",
            lambda place: _config("LMCacheConnectorV1", {}),
            pins=_LMCACHE,
            environment="lmcache",
            stored_bytes=_bytes_in_files,
            variables=_lmcache_in_process_variables,
            has_files=True,
        ),
        Contestant(
            "heterocache_and_lmcache",
            lambda place: _config(
                "MultiConnector",
                {"connectors": [kv_transfer_config({"dram_gib": MEMORY_GIB}), _lmcache(place)]},
            ),
            pins=_LMCACHE,
            environment="lmcache",
            services=_lmcache_server,
            variables=_lmcache_variables,
            has_files=True,
            is_rival=False,
        ),
        Contestant(
            "mooncake",
            lambda place: _config("MooncakeStoreConnector", {}),
            pins=("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
            debian=("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200"),
            services=_mooncake_master,
            variables=_mooncake_variables,
            stored_bytes=_mooncake_bytes,
        ),
        Contestant(
            "nixl",
            lambda place: _config("NixlConnector", _NIXL, kv_buffer_device="cpu"),
            variables=_nixl_variables,
            has_prefiller=True,
        ),
        Contestant(
            "nixl_push",
            lambda place: _config("NixlPushConnector", _NIXL, kv_buffer_device="cpu"),
            variables=_nixl_variables,
            has_prefiller=True,
        ),
        Contestant(
            "pegaflow",
            _pegaflow,
            pins=("pegaflow-llm==0.25.1",),
            services=_pegaflow_server,
        ),
        Contestant(
            "offloading",
            lambda place: _config(
                "OffloadingConnector", {"cpu_bytes_to_use": MEMORY_GIB << 30}
            ),
        ),
        Contestant(
            "simple_cpu_offload",
            lambda place: _config(
                "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": MEMORY_GIB << 30}
            ),
        ),
    )
}  # fmt: skip
"""All contestants by name: first the reference, then this package, then the others."""
