"""Layers that reliably call their hooks may be loaded while the forward runs."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from hetero_connector.engine.worker.layer_hooks import LayerHooks, calls_layer_hooks


def ran(hooks: LayerHooks, layers: Iterable[str]) -> None:
    """Run a step whose forward calls the hooks of these layers."""
    hooks.begin_step()
    for layer in layers:
        hooks.on_called(layer)


def reliable(hooks: LayerHooks) -> set[str]:
    hooks.begin_step()
    return {layer for layer in ("target", "draft", "aux") if layer in hooks}


def test_a_layer_is_reliable_from_the_step_after_its_first_hook() -> None:
    hooks = LayerHooks()
    assert reliable(hooks) == set()
    ran(hooks, ["target"])
    assert reliable(hooks) == {"target"}


def test_a_model_without_hooks_is_told_from_one_that_has_not_run() -> None:
    hooks = LayerHooks()
    assert not hooks.begin_step()
    assert not hooks.begin_step()
    hooks.expect()
    assert hooks.begin_step()
    hooks.expect()
    assert not hooks.begin_step(), "nothing new"


def test_only_a_step_that_teaches_something_is_news() -> None:
    hooks = LayerHooks()
    news = []
    for layers in (["target", "draft"], ["target", "draft"], [], ["target"], ["target", "draft"]):
        hooks.expect()
        for layer in layers:
            hooks.on_called(layer)
        news.append(hooks.begin_step())
    assert news == [True, False, False, True, False]


def test_a_layer_that_was_left_out_once_is_never_reliable_again() -> None:
    hooks = LayerHooks()
    ran(hooks, ["target", "draft"])
    ran(hooks, ["target"])
    assert reliable(hooks) == {"target"}
    ran(hooks, ["target", "draft"])
    assert reliable(hooks) == {"target"}


def test_a_step_in_which_only_the_drafter_calls_hooks_changes_nothing() -> None:
    """The model runs as a full graph, and its drafter does not."""
    hooks = LayerHooks()
    ran(hooks, ["target", "draft"])
    ran(hooks, ["draft"])
    assert reliable(hooks) == {"target", "draft"}


def test_a_step_without_hooks_changes_nothing() -> None:
    hooks = LayerHooks()
    ran(hooks, ["target", "draft"])
    ran(hooks, [])
    assert reliable(hooks) == {"target", "draft"}


@pytest.mark.parametrize(
    ("metadata", "graphs", "called"),
    [
        ({"layer": object()}, CUDAGraphMode.NONE, True),
        ({"layer": object()}, CUDAGraphMode.PIECEWISE, True),
        ({"layer": object()}, CUDAGraphMode.FULL, False),
        (None, CUDAGraphMode.NONE, False),
    ],
)
def test_hooks_are_called_by_python_with_attention_metadata(
    metadata: Any, graphs: CUDAGraphMode, called: bool
) -> None:
    context: Any = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=graphs)
    assert calls_layer_hooks(context) is called
