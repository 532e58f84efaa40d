"""Run vLLM's second model runner, the default on CUDA, on the CPU build.

    make test-second-runner
    PYTHONPATH=tests/second_runner python -m pytest -p second_runner tests/engine/test_exactness.py

vLLM refuses that runner on a CPU for one reason only: Triton has no backend there. This directory
brings one that exists by name (`triton_by_name`), and Triton's interpreter runs vLLM's own kernels.
The entry points in this directory switch both on in every process that has it on its path: put it
there for these tests only.

vLLM chooses its runner when it is imported, so the same tests for both runners are two runs of
pytest. The summary has the number of kernels that ran in pytest's processes; none fails the run.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

HERE = str(Path(__file__).resolve().parent)
ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

DESELECTED = {
    "test_power_a_mask_after_the_forward_is_seen": "its late hook raises: it is outside the forward"
}
"""Tests that do not apply to this runner, and why."""

launches: Counter[str] = Counter()
"""Kernels that ran, by name."""
_is_adapted = False


def select() -> None:
    """Choose the second runner for this process and its children; before vLLM is imported."""
    if "vllm.triton_utils" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("vLLM is imported already: load this plugin with -p second_runner")
    os.environ.update(ENVIRONMENT)
    if HERE not in sys.path:
        sys.path.append(HERE)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if HERE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, HERE])


def adapt() -> None:
    """Adapt Triton's interpreter to vLLM's kernels; results stay the same.

    Called by vLLM in each of its processes (entry point group `vllm.general_plugins`).
    """
    global _is_adapted
    if _is_adapted or os.environ.get("TRITON_INTERPRET") != "1":
        return
    _is_adapted = True
    _patch_language_once()
    _leave_arguments_in_place()
    _accept_integer_masks()
    _replace_slow_kernels()


def _patch_language_once() -> None:
    """Patch `triton.language` once for good.

    The interpreter patches it for each launch and each call of a device function, and restores
    it afterwards, which takes a millisecond each time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def anything() -> None: ...

    interpreter._patch_lang(types.FunctionType(anything.__code__, {"tl": tl, "core": tl.core}))
    permanent = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: permanent


def _leave_arguments_in_place() -> None:
    """Skip the copies of arguments to the host and back, and count launches.

    Arguments are in host memory already; each copy moves the whole storage that an argument
    is a view of, which may be the complete KV cache.
    """
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    launch = executor.__call__

    def counted_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(self, *args, **kwargs)
        launches[self.fn.__name__] += 1

    executor.__call__ = counted_launch
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda *_: None


def _accept_integer_masks() -> None:
    """Turn integer masks into booleans; vLLM's n-gram kernel makes one by a reduction."""
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == bool:
            return mask
        return handle((mask.data & 1).astype(bool), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, as_bool(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, as_bool(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _replace_slow_kernels() -> None:
    """Replace kernels that the interpreter runs too slowly, or cannot run, by torch or C.

    Zeroing pages takes it up to 300 ms a step. A recurrent state is copied by 16 programs to
    keep a GPU busy; one does the same. The top-k kernel does not run in it.
    """
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import mamba_utils

    mamba_utils._TEMPORAL_TILES = 1
    topk_topp_sampler.HAS_TRITON = False
    register_kernels({"vllm.v1.worker.utils._zero_kv_blocks_kernel": _zero_blocks})


def _zero_blocks(
    seg_addrs: Any,
    seg_block_strides: Any,
    seg_page_sizes: Any,
    block_ids: Any,
    BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Zero blocks in every segment; strides and sizes count elements of four bytes."""
    launches["_zero_kv_blocks_kernel"] += 1
    blocks = block_ids.tolist()
    segments = zip(
        seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist(), strict=True
    )
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


if "PYTEST_VERSION" in os.environ:
    select()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if getattr(item, "originalname", None) in DESELECTED]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"second model runner: {launches.total():,} Triton kernels ran")


def pytest_testnodedown(node: Any) -> None:
    """Add the kernels that a worker of pytest-xdist ran."""
    launches["in workers"] += getattr(node, "workeroutput", {}).get("launches", 0)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in which the second runner ran nothing: it would have shown nothing."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launches"] = launches.total()
    elif exitstatus == 0 and not (launches.total() or session.config.option.collectonly):
        session.exitstatus = 1
