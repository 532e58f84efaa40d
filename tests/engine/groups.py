"""Groups of engine tests: pytest-xdist runs the tests of a group in one process, one after another.

pytest-xdist 3.8 does not find its own `xdist_group` marks under pytest 9, so the groups come from
the names of the tests. `tests/conftest.py` has the scheduler.
"""

from __future__ import annotations

from pathlib import PurePath

MODELS = ("dense", "gemma3", "gptoss", "deepseek_v4", "qwen3_next", "mla")
_SHARED_ENGINE = {
    **dict.fromkeys(("test_exactness", "test_exact_matrix", "test_replay"), "shared"),
    **dict.fromkeys(("test_situations", "test_bytes", "test_full_steps"), "shared"),
    **dict.fromkeys(("test_parked_loads", "test_recurrent_loads"), "shared"),
    **dict.fromkeys(("test_power", "test_presets_match_engine"), "stock"),
    **dict.fromkeys(("test_soak", "test_replay_pressure"), "soak"),
}
"""Modules whose tests use `shared_llm`, `stock_llm` or the traffic of `soaking.recorded`."""


def group_of(node_id: str) -> str:
    """Return the shared engine or traffic that a test uses, or else its file."""
    file, _, test = node_id.partition("::")
    kind = _SHARED_ENGINE.get(PurePath(file).stem)
    models = set(test.partition("[")[2].removesuffix("]").split("-")).intersection(MODELS)
    return f"{kind} {models.pop()}" if kind and models else file
