"""Pages for those who come from another connector, or from another version."""

from __future__ import annotations

from made import NOTE, table

_DIFFERENCES = {
    "LMCache": (
        "`LMCacheConnectorV1` or `LMCacheMPConnector`",
        "No server and no coordinator: the cache is in the engine core's process.",
        {
            "chunk_size": "by default 256 tokens, rounded up to the model's alignment",
            "local_cpu": "a size, no switch: DRAM is always used",
            "local_disk": "a path without `file://`",
            "remote_url": "a Redis that records who owns what; bytes go from engine to engine",
        },
        "`PYTHONHASHSEED` is not needed: chains have a hash of their own. Object stores "
        "are not supported; a shared file system only to take over what a dead engine left "
        "([several engines](several-engines.md#when-an-engine-dies)).",
    ),
    "Mooncake": (
        "`MooncakeStoreConnector` or `MooncakeConnector`",
        "No master and no metadata server: engines read each other's DRAM, and Redis records who "
        "owns what.",
        {
            "global_segment_size": "GiB, not bytes; the engine's own DRAM tier, which peers read",
            "local_hostname": "an address of this machine; peers on other hosts use it",
            "master_server_address": "the URL of a Redis",
            "metadata_server": "the URL of a Redis",
        },
        "Transfers go through NIXL and UCX: name devices with `UCX_NET_DEVICES`, as Mooncake's "
        "`device_name` did.",
    ),
    "vLLM's offloading": (
        "`OffloadingConnector`, `SimpleCPUOffloadConnector` or `--kv-offloading-size`",
        "The same place, the engine itself; state survives a restart and models with several kinds "
        "of state are stored by kind.",
        {
            "cpu_bytes_to_use": "GiB, not bytes",
            "num_cpu_blocks": "GiB, not blocks",
            "block_size": "tokens per stored chunk",
            "eviction_policy": "`leaf_lru` or `value`",
        },
        "Its panels go on showing bytes and seconds ([metrics](../reference/metrics.md)). In place "
        "of a secondary tier of type `fs` set `ssd_dir`.",
    ),
}
"""For each product: its connectors, what is different, notes on keys, and what else changes."""


def coming_from() -> str:
    """Return the guide from other connectors, key by key."""
    from hetero_connector.config import OTHER_NAMES

    assert OTHER_NAMES.keys() == _DIFFERENCES.keys(), "describe every product here"
    parts = [
        f"{NOTE}# Coming from another connector\n\n"
        "Name `HeteroConnector` as `kv_connector`, and `kv_both` as `kv_role`. An engine that gets "
        "one of the keys below does not start, and its message names ours. Nothing of another "
        "connector's stores is read: the cache fills again."
    ]
    for product, keys in OTHER_NAMES.items():
        connectors, difference, notes, rest = _DIFFERENCES[product]
        assert notes.keys() <= keys.keys(), f"{product}: a note on a key that is not translated"
        rows = [[f"`{key}`", f"`{ours}`", notes.get(key, "")] for key, ours in keys.items()]
        parts.append(
            f"## {product}\n\nIn place of {connectors}. {difference}\n\n"
            f"{table(['there', 'here', 'note'], rows)}\n\n{rest}"
        )
    parts.append(
        "## Two connectors at once\n\nInside a MultiConnector HeteroCache may stand next to "
        "others, such as `NixlConnector` for handoffs. A request is restored by the first one that "
        "has something of it, and saved by all. For handoffs an engine has either a `directory` or "
        "another connector, never both: each answers a prefill with `do_remote_prefill`, and vLLM "
        "ends an engine in which two connectors do. `kv_load_failure_policy` is the "
        "MultiConnector's own."
    )
    return "\n\n".join(parts) + "\n"


def compatibility() -> str:
    """Return the page of what is promised between versions."""
    from hetero_connector import __version__
    from hetero_connector.artifacts.identity import FORMAT_VERSION
    from hetero_connector.config import KEYS
    from hetero_connector.engine.scheduler.chain_answer import CHAIN_FORMAT
    from hetero_connector.metrics import METRICS
    from hetero_connector.planner.profile import PROFILE_FORMAT
    from hetero_connector.store.peers import card
    from hetero_connector.store.ssd import generation_file, journal_format
    from hetero_connector.supported_vllm import SUPPORTED_VLLM
    from hetero_connector.tools.export_format import EXPORT_FORMAT
    from hetero_connector.transfer import agent_metadata
    from ownership.directory.redis import encoding

    oldest, *_, newest = SUPPORTED_VLLM
    major, minor = map(int, newest.split("."))
    older = f"{oldest.split('.')[0]}.{int(oldest.split('.')[1]) - 1}"
    versions = [[version, "validated", tested] for version, tested in SUPPORTED_VLLM.items()]
    versions += [
        [f"patch releases of {' and '.join(SUPPORTED_VLLM)}", "expected", "Not run one by one."],
        [f"{older} and older, {major}.{minor + 1} and newer", "refused", "An error at start."],
    ]
    stored = [
        ["stored bytes, chunk hashes, fingerprint", str(FORMAT_VERSION), "a part of the identity: "
         "what another version stored is not found, and is deleted when room is needed"],
        ["journal of `ssd_dir`", str(journal_format.FORMAT_VERSION), "a folder of another version "
         "is refused at start, with what to do"],
        ["`generation` next to the journal", str(generation_file._VERSION), "what was stored "
         "before is not found, as after a reset"],
        ["directory in Redis", str(encoding.FORMAT_VERSION), "an engine of another version is "
         "refused by the fleet, and goes on with its local cache alone: upgrade all engines "
         "together, or name another fleet (`?fleet=NEW`)"],
        ["what engines tell their peers", f"{card._VERSION}, {agent_metadata._VERSION}", "peers "
         "read nothing from each other, and compute it"],
        ["answer to routers", str(CHAIN_FORMAT), "the router does not know what that engine has "
         "stored"],
        ["files of `heterocache export`", str(EXPORT_FORMAT), "refused by `heterocache import`: "
         "export again"],
        ["`learned.json`, profiles", str(PROFILE_FORMAT), "learned anew; a `planner_profile` is "
         "refused at start"],
    ]  # fmt: skip
    keys = ", ".join(f"`{key.name}`" for key in KEYS)
    return f"""{NOTE}# Compatibility

Of version {__version__}. While the version begins with 0, a release may change what is listed here;
the [changelog](../changelog.md) then has a table of old and new names. From 1.0 on only a major
release may.

## vLLM

{table(["vLLM", "state", "what was run"], versions)}

The connector's interface changes between vLLM's minor releases, so others are refused and not
tried. Models, features and platforms are under [limits](../guides/limits.md).

## Python

3.11: every test. 3.12 and 3.13: expected, not run. pip refuses others.

## Names

- **Configuration**: {len(KEYS)} keys ({keys}). A removed or renamed key is refused at start with
  the name to use; it is never ignored.
- **Metrics**: {len(METRICS)}, all in the [reference](metrics.md).
- **Commands and requests**: [commands](cli.md), [request parameters](requests.md).
- **Modules** that can be imported may change with any release.

## Formats

{table(["format", "version", "another version"], stored)}

Engines of one fleet share state if their fingerprints are equal. The version of vLLM is a part of
them. During a rollout old and new ones keep apart, and each finds its own.

On one `ssd_dir` the new engine deletes what the old one stored, as far as `ssd_gib` needs the room.
To be able to go back, give the new version another `ssd_dir`, or `heterocache export` first.
"""
