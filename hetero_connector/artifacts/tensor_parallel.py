"""What tensor parallelism does to state: which bytes of a page belong to which rank.

The page of one rank alone (TP 1) is the *whole page*. Every rank's page is a part of it:

    whole page of 4 KV heads    | head 0 | head 1 | head 2 | head 3 |
    TP 2                        |     rank 0      |     rank 1      |
    TP 8                        | 0    1 | 2    3 | 4    5 | 6    7 |   two ranks hold the same
    MLA, compressed, indexer    |             every rank            |

Keys and values are cut by KV head, the outermost dimension of a page (vLLM's logical
`[block, head, token, content]`, `v1/kv_cache_layout.py`), so a page is one *run*. A recurrent
state has several, each cut by heads for itself:

    TP 1     | q        | k        | v            | delta-rule state           |
    TP 2     | q0 k0 v0 state0 |    | q1 k1 v1 state1 |

Artifacts hold whole pages, so their bytes are the same for every TP size that can hold them: what
one engine sealed another reads, writes to its own SSD, or finds there after a restart with
other ranks. A layer whose cut is not known has one run all the same, so its whole page is
its parts one after the other: good for engines of that TP size only (`refusal`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_connector.spec.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class PageRun:
    """Bytes of a rank's page that lie together in the whole page too."""

    start: int
    """Offset in the rank's page."""
    size_bytes: int
    whole_start: int
    """Offset in the whole page."""


def page_runs(layer: LayerSpec, tp_size: int, rank: int) -> tuple[PageRun, ...]:
    """Where the pages of a rank lie in the whole pages: neighbours are one run."""
    part = _part(layer, tp_size, rank)
    if layer.parts == 1:
        return (PageRun(0, layer.page_bytes, 0),)
    runs, start = [], 0
    for size in layer.runs or (layer.page_bytes,):
        runs.append(PageRun(start, size, start * layer.parts + part * size))
        start += size
    return tuple(runs)


def is_writer(layer: LayerSpec, tp_size: int, rank: int) -> bool:
    """Whether the rank is the one that stores its part: the first of those that hold it."""
    return rank == _part(layer, tp_size, rank) * tp_size // layer.parts


def whole_model(model: ModelSpec) -> ModelSpec:
    """The model on one rank: equal for every TP size that can read each other's state.

    What is not in an artifact's bytes, the stride of pages in memory, is left out. Group
    numbers stay: they order the layers.
    """
    return replace(model, layers=tuple(map(_whole_layer, model.layers)), tp_size=1)


def refusal(model: ModelSpec) -> str | None:
    """Why only engines of the same TP size can use this model's state; None if all can."""
    for layer in model.stored_layers:
        if not layer.runs:
            return (
                f"how tensor parallelism cuts the {layer.state_type.value} state of "
                f"{layer.layer} is not known"
            )
    return None


def _part(layer: LayerSpec, tp_size: int, rank: int) -> int:
    """vllm/model_executor/layers/linear.py, `QKVParallelLinear`: `tp_rank // num_kv_head_replicas`.

    With as many parts as ranks, each its own.
    """
    return rank * layer.parts // tp_size


def _whole_layer(layer: LayerSpec) -> LayerSpec:
    size = layer.whole_page_bytes
    runs = tuple(run * layer.parts for run in layer.runs)
    return replace(layer, page_bytes=size, page_stride_bytes=size, parts=1, runs=runs)
