"""Build the two sides from vLLM's configuration, with every check that can fail."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetero_connector import __version__, machine
from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.artifacts.identity import Fingerprint
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.artifacts.tensor_parallel import refusal
from hetero_connector.config import KEYS, HeteroConfig
from hetero_connector.config_values import without_password
from hetero_connector.engine.scheduler import idle_steps, weight_updates
from hetero_connector.engine.scheduler.block_events import BlockEvents, EventGroup
from hetero_connector.engine.scheduler.fleet import Fleet
from hetero_connector.engine.scheduler.learned import LearnedKeeper, recall
from hetero_connector.engine.scheduler.media import media_ids
from hetero_connector.engine.scheduler.request_identifier import RequestIdentifier
from hetero_connector.engine.scheduler.scheduler_side import Policies, SchedulerSide
from hetero_connector.engine.scheduler.spans import SpanWriter
from hetero_connector.engine.startup import engine_identity, rendezvous, replay_support
from hetero_connector.engine.startup.dram_tier import (
    bytes_of_prompt,
    engines_on_host,
    tokens_in,
    with_dram,
)
from hetero_connector.engine.startup.geometry import merge_stages, model_spec
from hetero_connector.engine.startup.heads import ModelHeads, equal_on_all_ranks
from hetero_connector.engine.startup.policies import (
    checkpoint_policy,
    first_costs,
    learned,
    learned_path,
    restore_planner,
)
from hetero_connector.engine.startup.rendezvous import WorkerGeometry
from hetero_connector.engine.startup.rounding import rounding
from hetero_connector.engine.worker.worker_side import WorkerSide
from hetero_connector.errors import ConfigError
from hetero_connector.metrics import Recorder
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import EngineSettings
from hetero_connector.planner.pricing import Parking
from hetero_connector.planner.profile import CopyEngines, CostProfile
from hetero_connector.planner.sessions import ThinkTimes
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.catalog.prefetch_schedule import PrefetchCosts
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.catalog.write_budget import burst_bytes
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd.journal_format import REPLAY_EXACT, WINDOW_REPLAY
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.units import GIB, size_text

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.heterocache")

_PEER_SHARE = 5
"""A peer, an adapter or a media item may take a fifth of a restore's deadline, so that time is left
to read or compute otherwise."""
_THIS_HOST = (None, "", "localhost", "127.0.0.1", "::1")


def open_worker_side(
    vllm_config: VllmConfig, kv_cache: KVCacheConfig, config: HeteroConfig, recorder: Recorder
) -> WorkerSide | None:
    """Return the worker side of this rank; None if this engine is not supported."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
    from vllm.platforms import current_platform

    engine_identity.check_supported(vllm_config)
    platform = current_platform.device_name
    heads = _heads(vllm_config, config, platform)
    model = model_spec(kv_cache, vllm_config.parallel_config.tensor_parallel_size, heads)
    model = replace(model, exact_handoffs=config.exact_handoffs)
    rank = get_tensor_model_parallel_rank()
    backends = _attention_backends(vllm_config)
    geometry = WorkerGeometry(
        rank=rank,
        model=model,
        attention_backends=backends,
        device=vllm_config.device_config.device_type,
        pid=os.getpid(),
        rounding=rounding(vllm_config),
        replay_refusal=replay_support.engine_refusal(
            config.replay, platform, backends, vllm_config
        ),
        stage=get_pp_group().rank_in_group,
    )
    rendezvous.publish_geometry(rendezvous.engine_name(vllm_config), geometry)
    if engine_identity.unsupported_reason(geometry, vllm_config):
        return None
    layout = ArtifactLayout(model, _chunk_tokens(config, model))
    return WorkerSide(
        layout,
        rank,
        kv_cache.num_blocks,
        config.layerwise,
        recorder,
        any_tp=_uses_any_tp(config, model),
        microbatches=vllm_config.parallel_config.use_ubatching,
        recovers=_recovers(vllm_config, kv_cache, model),
        copy_engines=_copy_engines(config, vllm_config),
    )


def _copy_engines(config: HeteroConfig, vllm_config: VllmConfig) -> CopyEngines | None:
    """Return the use of a GPU's copy engines that was measured; None: they are not used.

    The scheduler side refuses the profile of another model or machine. Here the model may have
    changed its config while it was loaded.
    """
    if config.planner_profile is None or vllm_config.device_config.device_type != "cuda":
        return None
    return CostProfile.read(config.planner_profile).copy_engines


def _recovers(config: VllmConfig, kv_cache: KVCacheConfig, model: ModelSpec) -> bool:
    """Return False if vLLM takes no report of blocks, or would compute them again too late.

    It takes reports for one KV cache group. With async scheduling or pipeline stages it takes the
    next step's tokens for this one's. It goes on from the block before a lost one, where a
    recurrent layer has no state. A MultiConnector's own policy counts, not that of a child.
    """
    from vllm.config import get_current_vllm_config_or_none

    transfer = (get_current_vllm_config_or_none() or config).kv_transfer_config
    assert transfer is not None
    recomputes = transfer.kv_load_failure_policy == "recompute"
    is_recurrent = StateType.RECURRENT in model.state_types
    is_wrong = recomputes and (config.max_concurrent_batches > 1 or is_recurrent)
    return len(kv_cache.kv_cache_groups) == 1 and not is_wrong


def open_scheduler_side(
    vllm_config: VllmConfig, kv_cache: KVCacheConfig, config: HeteroConfig, recorder: Recorder
) -> SchedulerSide | None:
    """Return the scheduler side with its store open; None if this engine is not supported."""
    parallel = vllm_config.parallel_config
    engine = rendezvous.engine_name(vllm_config)
    workers = rendezvous.collect_geometries(engine, parallel.world_size)
    geometry = _whole_geometry(workers)
    if (reason := engine_identity.unsupported_reason(geometry, vllm_config)) is not None:
        logger.warning("HeteroConnector stores nothing for this model: %s", reason)
        return None
    chunk_tokens = _chunk_tokens(config, geometry.model)
    identity = engine_identity.fingerprint(
        vllm_config, kv_cache, geometry, chunk_tokens, any_tp=_uses_any_tp(config, geometry.model)
    )
    layout = ArtifactLayout(geometry.model, chunk_tokens)
    config = with_dram(config, layout, vllm_config)
    window_replay = _window_replay(geometry, config)
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    settings = _settings(config, geometry, step_tokens, microbatches=parallel.use_ubatching)
    subject = engine_identity.profile_subject(vllm_config)
    store_config = _store_config(
        config, vllm_config, shared=any(w.pid != os.getpid() for w in workers)
    )
    learned_file = learned_path(store_config, identity.digest)
    kept = None if learned_file is None else recall(learned_file, subject)
    profile = first_costs(config, subject, kept)
    planner = restore_planner(config, layout, step_tokens, window_replay, profile)
    policies = Policies(
        planner,
        checkpoint_policy(config, layout, planner.costs, kept),
        window_replay,
        ThinkTimes(pace=None if kept is None else kept.pace),
        "off" if config.planner == "never_load" else config.prefetch,
    )
    fleet = _join(config, vllm_config, recorder)
    store = ArtifactStore.open(
        layout.max_bytes,
        store_config,
        recorder,
        fingerprint=identity.digest,
        description=identity.describe()
        | {WINDOW_REPLAY: geometry.replay_refusal or REPLAY_EXACT}
        | settings.described(),
        chunk_tokens=chunk_tokens,
        seconds_saved=SecondsSaved(planner.costs.compute.predict),
        prefetch_costs=PrefetchCosts(
            lambda artifact: planner.costs.load.artifact_seconds(
                Tier.SSD, artifact.state_type, artifact.size_bytes
            ),
            policies.think_times.return_probability,
        ),
        peers=None if fleet is None else _peer_access(fleet, config),
        size_of=layout.artifact_bytes,
    )
    if fleet is not None:
        assert store.sharing is not None
        fleet.start(store.sharing)
    engine_identity.record_info(identity, recorder)
    logger.info("HeteroConnector: %s", _summary(layout, config))
    for warning in _warnings(layout, config, vllm_config.model_config.max_model_len):
        logger.warning("HeteroConnector: %s", warning)
    weight_updates.observe()
    idle_steps.observe()
    hasher = ChainHasher(identity.digest, chunk_tokens)
    side = SchedulerSide(
        layout,
        hasher,
        store,
        recorder,
        policies,
        layerwise=settings.layerwise,
        parking=settings.parking,
        load_deadline_s=config.load_deadline_s,
        fleet=fleet,
        identifier=RequestIdentifier(
            recorder, media_ids(config, vllm_config), config.load_deadline_s / _PEER_SHARE
        ),
        num_ranks=len(workers),
        events=None
        if config.planner == "never_load"
        else _block_events(vllm_config, kv_cache, layout.model, store, window_replay),
    )
    name = str(vllm_config.model_config.model)
    side.serve_status(
        rendezvous.status_path(engine),
        _about(name, engine, layout, identity, config)
        | {
            "worker": _worker_name(config, vllm_config) if config.directory else "",
            "costs_from": "a guess" if profile is None else profile.origin,
            "served_as": vllm_config.model_config.served_model_name,
        },
        lambda: CostProfile.of(planner.costs, name, subject),
    )
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    if endpoint is not None:
        side.reports.spans = SpanWriter.open(endpoint)
    if learned_file is not None:
        side.keep_learned(LearnedKeeper(learned_file, partial(learned, policies, name, subject)))
    return side


def _whole_geometry(workers: Sequence[WorkerGeometry]) -> WorkerGeometry:
    """Return the geometry of all pipeline stages together, as of rank 0 of an only stage."""
    stages = [x for x in workers if x.rank == workers[0].rank]
    model = merge_stages([x.model for x in stages])
    refusals = [*(x.replay_refusal for x in stages), replay_support.model_refusal(model)]
    return replace(
        workers[0],
        model=model,
        attention_backends=tuple(sorted({x for s in stages for x in s.attention_backends})),
        replay_refusal=next(filter(None, refusals), None),
    )


def _about(
    model: str, engine: str, layout: ArtifactLayout, identity: Fingerprint, config: HeteroConfig
) -> dict[str, Any]:
    """Return what people ask of an engine that does not change while it runs."""
    values = {key.name: getattr(config, key.name) for key in KEYS}
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    return {
        "model": model,
        "engine": engine,
        "pid": os.getpid(),
        "heterocache": __version__,
        "vllm": engine_identity.engine_version(),
        "fingerprint": identity.hex,
        "tokenizer": identity.tokenizer.hex(),
        "chunk_tokens": layout.chunk_tokens,
        "config": {**plain, "directory": without_password(config.directory)},
    }


def _block_events(
    vllm_config: VllmConfig,
    kv_cache: KVCacheConfig,
    model: ModelSpec,
    store: ArtifactStore,
    window_replay: WindowReplay | None,
) -> BlockEvents | None:
    """Return the maker of block events; None unless the engine publishes its own."""
    settings = vllm_config.kv_events_config
    if settings is None or not settings.enable_kv_cache_events:
        return None
    group = EventGroup.of(kv_cache)
    if group is None:
        logger.warning(
            "no KV events are published of what is stored: routers index blocks of full "
            "attention, and this model has none"
        )
        return None
    return BlockEvents(group, model, store, window_replay.tokens if window_replay else None)


def _join(config: HeteroConfig, vllm_config: VllmConfig, recorder: Recorder) -> Fleet | None:
    """Return the membership of the fleet that the configuration names; None if it names none.

    Raises ConfigError if the directory's address is wrong.
    """
    if not config.directory:
        return None
    from ownership.member.joining import open_worker

    name = _worker_name(config, vllm_config)
    return open_worker(config.directory, name, config.lease_s, config.load_deadline_s, recorder)


def _worker_name(config: HeteroConfig, vllm_config: VllmConfig) -> str:
    """Return the name of this engine in its fleet's directory."""
    assert vllm_config.kv_transfer_config is not None
    name = config.worker_name
    rank = rendezvous.data_parallel_rank(vllm_config)
    if not name:
        name = f"{socket.gethostname()}-{vllm_config.kv_transfer_config.engine_id}"
    elif rank is not None:  # each data-parallel engine is a worker of the fleet
        name = f"{name}-dp{rank}"
    return name


def _peer_access(fleet: Fleet, config: HeteroConfig) -> PeerAccess:
    interface = machine.addresses()[config.peer_host] if config.peer_host else ""
    return PeerAccess(
        fleet.peers, lambda regions: NixlPeers(regions, interface=interface), fleet.wake
    )


def _settings(
    config: HeteroConfig, geometry: WorkerGeometry, step_tokens: int, *, microbatches: bool
) -> EngineSettings:
    layerwise = config.layerwise != "off" and not microbatches
    parking = _parking(geometry)
    return EngineSettings(config.planner, step_tokens, layerwise, config.load_deadline_s, parking)


def _parking(geometry: WorkerGeometry) -> Parking:
    """Return the loads that park their request.

    A CPU copies on the thread that computes, so decodes wait for a load in any case.
    """
    return "never" if geometry.device == "cpu" else "long"


def _chunk_tokens(config: HeteroConfig, model: ModelSpec) -> int:
    if config.chunk_tokens is None:
        return model.default_chunk_tokens()
    if config.chunk_tokens % model.alignment:
        raise ConfigError(
            "chunk_tokens",
            f"{config.chunk_tokens} is not a multiple of {model.alignment}, the token grid on "
            f"which this model's prefixes can be resumed; try {model.default_chunk_tokens()}",
        )
    return config.chunk_tokens


def _store_config(config: HeteroConfig, vllm_config: VllmConfig, *, shared: bool) -> StoreConfig:
    ssd_dir, per_day = config.ssd_dir, config.ssd_write_bytes_per_day
    # Data-parallel engines are separate caches. Each gets its share of the space if vLLM says how
    # many there are; for a model without experts it tells each engine that it is the only one.
    engines, rank = _engines_of_ssd(vllm_config), rendezvous.data_parallel_rank(vllm_config)
    if ssd_dir is not None and rank is not None:
        ssd_dir = ssd_dir / f"dp{rank}"
    return StoreConfig(
        dram_bytes=config.dram_bytes,
        shared=shared,
        ssd_dir=ssd_dir,
        ssd_bytes=config.ssd_bytes // engines,
        ssd_write_bytes_per_day=None if per_day is None else max(1, per_day // engines),
        eviction=config.eviction,
        verify=config.verify,
        load_deadline_s=config.load_deadline_s,
        peer_deadline_s=config.load_deadline_s / _PEER_SHARE,
        replica_ttl_s=config.replica_ttl_s,
        adopt_from=config.adopt_from,
        # An artifact is claimed when its checksum is known; in a fleet that should be at once.
        spill_delay_s=0.0 if config.directory else StoreConfig.spill_delay_s,
    )


def _engines_of_ssd(vllm_config: VllmConfig) -> int:
    """Return how many data-parallel engines share this host's `ssd_dir`, at most.

    With `--data-parallel-rank` vLLM counts one on each host, however many were started there.
    """
    parallel = vllm_config.parallel_config
    engines = int(parallel.data_parallel_size)
    if parallel.data_parallel_external_lb:
        return engines
    return min(engines, engines_on_host(vllm_config))


def _heads(vllm_config: VllmConfig, config: HeteroConfig, platform: str) -> ModelHeads:
    """Return the heads by which pages are cut over ranks.

    For engines of this TP size only, a head is stored once if that changes no bit of it, and the
    pages of a recurrent state are stored as they are, in one run.
    """
    heads = ModelHeads.of(vllm_config)
    if config.tp_sizes == "any":
        return heads
    return ModelHeads(heads.kv if equal_on_all_ranks(vllm_config, platform) else None)


def _uses_any_tp(config: HeteroConfig, model: ModelSpec) -> bool:
    return config.tp_sizes == "any" and refusal(model) is None


def _attention_backends(vllm_config: VllmConfig) -> tuple[str, ...]:
    context = vllm_config.compilation_config.static_forward_context
    names = {
        layer.get_attn_backend().get_name()
        for layer in context.values()
        if hasattr(layer, "get_attn_backend")
    }
    return tuple(sorted(names))


def _window_replay(geometry: WorkerGeometry, config: HeteroConfig) -> WindowReplay | None:
    """Return the replay of this engine, and log the decision if the model has windows."""
    if StateType.WINDOW_SWA not in geometry.model.state_types:
        return None
    if (reason := geometry.replay_refusal) is not None:
        level = logging.WARNING if config.replay == "on" else logging.INFO
        logger.log(level, "HeteroConnector: no window replay: %s", reason)
        return None
    replay = WindowReplay.of(geometry.model)
    logger.info(
        "HeteroConnector: window replay: a boundary whose windows are not stored costs %s tokens "
        "that are computed again",
        f"{replay.tokens:,}",
    )
    return replay


def _warnings(layout: ArtifactLayout, config: HeteroConfig, max_model_len: int) -> list[str]:
    """Return warnings about settings that are allowed but probably not intended."""
    warnings = _fleet_warnings(config)
    if layout.chunk_tokens > max_model_len:
        warnings.append(
            f"chunk_tokens={layout.chunk_tokens} exceeds the {max_model_len} tokens a request may "
            "have: only the ends of requests are stored"
        )
    chunk_bytes = sum(map(padded, layout.max_bytes.values()))
    in_dram = tokens_in(layout, config.dram_bytes)
    longest = max_model_len // layout.chunk_tokens * layout.chunk_tokens
    if in_dram < longest:
        needed = bytes_of_prompt(layout, longest) / GIB
        warnings.append(
            f"dram_gib={config.dram_gib:g} holds {in_dram:,} tokens, fewer than the {longest:,} of "
            "the longest request, which cannot be restored completely. Raise it to "
            f"{needed:.4g}, or lower max_model_len"
        )
    if config.tp_sizes == "any" and (reason := refusal(layout.model)) is not None:
        warnings.append(f"tp_sizes='any' has the effect of 'own' for this model: {reason}")
    per_day = config.ssd_write_bytes_per_day
    if per_day is not None and burst_bytes(per_day) < chunk_bytes:
        warnings.append(
            f"ssd_write_gib_per_day={config.ssd_write_gib_per_day:g} allows bursts of "
            f"{burst_bytes(per_day):,.0f} bytes, less than the {chunk_bytes:,} of a chunk: hardly "
            "anything is written to the SSD. Raise it"
        )
    return warnings


def _fleet_warnings(config: HeteroConfig) -> list[str]:
    host = urlsplit(config.directory).hostname
    if host in _THIS_HOST or config.peer_host or "UCX_NET_DEVICES" in os.environ:
        return []
    return [
        f"the directory is on {host}, but peers on other hosts cannot read from this engine: if "
        "there are any, set peer_host to an address in the fleet's network"
    ]


def _summary(layout: ArtifactLayout, config: HeteroConfig) -> str:
    model = layout.model
    types = ", ".join(
        f"{t.value} {layout.max_bytes[t]:,} B"
        + ("/chunk" if t in model.prefix_types else "/checkpoint")
        for t in model.state_types
    )
    tokens = tokens_in(layout, config.dram_bytes)
    tiers = f"DRAM {config.dram_gib:.4g} GiB, which hold up to {tokens:,} tokens"
    if config.ssd_dir is not None:
        tiers += f", SSD {size_text(config.ssd_bytes)} in {config.ssd_dir}"
    versions = f"{__version__} on vLLM {engine_identity.engine_version()}"
    return f"{versions}; chunks of {layout.chunk_tokens} tokens: {types}; {tiers}"
