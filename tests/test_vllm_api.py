"""vLLM's API as the package uses it: its imports, its hooks, and what it patches."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from hetero_connector.connector import HeteroConnector

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "hetero_connector").rglob("*.py"))

LEFT_TO_VLLM = {
    "bind_connector_metadata": "keeps a step's metadata",
    "clear_connector_metadata": "drops it",
    "has_connector_metadata": "says if there is one",
    "role": "as vLLM gave it",
    "bind_gpu_block_pool": "block tables come from the KV cache manager",
    "finish_forward": "`wait_for_save` ends the step",
    "reset_capture_state": "a graph is captured without metadata, so no state changes",
    "get_finished": "`get_transfer_results` replaces it",
    "get_finished_count": "every rank reports",
    "get_loaded_kv_cache_group_ids": "a restore is complete in all groups",
    "get_mem_pool_context": "vLLM's own memory is used",
    "has_pending_block_frees": "no block is kept after its request",
    "register_finished_partial_tail": "the last page is copied, not kept",
    "restore_kv_caches": "pages come back at the same addresses",
    "set_host_xfer_buffer_ops": "copies go to the arena",
    "set_xfer_handshake_metadata": "ranks meet through files",
    "set_xfer_handshake_metadata_pp_aware": "the same",
    "supports_divergent_local_hybrid_hits": "False: local hits are complete in all groups",
    "get_kv_connector_kv_cache_events": "the scheduler side has the store, so it makes the events",
}
"""Hooks that are not overridden, and why."""


def vllm_imports() -> set[tuple[str, str | None]]:
    """Return (module, name) for every import of vLLM in the package, also those for types only."""
    found: set[tuple[str, str | None]] = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                found |= {(x.name, None) for x in node.names if x.name.split(".")[0] == "vllm"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), x.name) for x in node.names}
    return found


@pytest.mark.parametrize(("module", "name"), sorted(vllm_imports(), key=str))
def test_what_is_imported_exists(module: str, name: str | None) -> None:
    found = importlib.import_module(module)
    if name is not None and not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")


def hooks() -> dict[str, Any]:
    """Return vLLM's hooks by name."""
    return {
        name: hook
        for base in (SupportsHMA, KVConnectorBase_V1)
        for name, hook in vars(base).items()
        if not name.startswith("_")
    }


def test_each_hook_is_overridden_or_left_to_vllm_for_a_reason() -> None:
    """A new vLLM may have new hooks: decide what each should do here."""
    overridden = {name for name in hooks() if name in vars(HeteroConnector)}
    assert not overridden & set(LEFT_TO_VLLM)
    assert set(hooks()) - overridden <= set(LEFT_TO_VLLM)


@pytest.mark.parametrize("name", sorted(set(hooks()) & set(vars(HeteroConnector))))
def test_a_hook_takes_what_vllm_gives_it(name: str) -> None:
    theirs, ours = hooks()[name], inspect.getattr_static(HeteroConnector, name)
    assert type(ours) is type(theirs)
    if isinstance(theirs, property):
        return
    for function in (theirs, ours):
        assert not inspect.iscoroutinefunction(function)
    ours_taken, theirs_given = (
        inspect.signature(getattr(x, "__func__", x)).parameters.values() for x in (ours, theirs)
    )
    if any(x.kind is x.VAR_POSITIONAL for x in ours_taken):
        return  # it passes everything on
    assert [(x.name, x.kind) for x in ours_taken] == [(x.name, x.kind) for x in theirs_given]


def test_an_engine_that_sleeps_may_have_the_connector() -> None:
    """vLLM 0.33 asks at start, also for each connector inside a `MultiConnector`."""
    config = KVTransferConfig(kv_connector="HeteroConnector", kv_role="kv_both")
    assert HeteroConnector.supports_sleep_mode(config)
