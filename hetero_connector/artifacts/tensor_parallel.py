"""Tensor parallelism: the bytes of a page that belong to each rank.

The page of a single rank (TP 1) is the *whole page*. With more ranks, each rank's page is a part:

    whole page of 4 KV heads    | head 0 | head 1 | head 2 | head 3 |
    TP 2                        |     rank 0      |     rank 1      |
    TP 8                        | 0    1 | 2    3 | 4    5 | 6    7 |   two ranks have the same
    MLA, compressed, indexer    |             every rank            |

Keys and values are cut by KV head, the outermost dimension of a page (vLLM's logical
`[block, head, token, content]`, `v1/kv_cache_layout.py`), so a page is one *run*. A recurrent
state has several runs, each cut by heads separately:

    TP 1     | q        | k        | v            | delta-rule state           |
    TP 2     | q0 k0 v0 state0 |    | q1 k1 v1 state1 |

Artifacts contain whole pages, so their bytes are the same for every TP size: an artifact sealed by
one engine can be read by another, written to its SSD, or found there after a restart with other
ranks. A layer whose cut is not known counts as one run, so its whole page is its parts one after
the other; such state is only for engines of that TP size (`refusal`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_connector.spec.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class PageRun:
    """Bytes that are contiguous both in a rank's page and in the whole page."""

    start: int
    """Offset in the rank's page."""
    size_bytes: int
    whole_start: int
    """Offset in the whole page."""


def page_runs(layer: LayerSpec, tp_size: int, rank: int) -> tuple[PageRun, ...]:
    """The runs of a rank's page, in order."""
    part = _part(layer, tp_size, rank)
    if layer.parts == 1:
        return (PageRun(0, layer.page_bytes, 0),)
    runs, start = [], 0
    for size in layer.runs or (layer.page_bytes,):
        runs.append(PageRun(start, size, start * layer.parts + part * size))
        start += size
    return tuple(runs)


def is_writer(layer: LayerSpec, tp_size: int, rank: int, chunk: int) -> bool:
    """True if it is the rank's turn to store its part of a chunk, by the chunk's number.

    Ranks that have the same part take turns, so that none of them carries all the bytes.
    """
    sharers = tp_size // layer.parts
    return chunk % sharers == rank % sharers


def whole_model(model: ModelSpec) -> ModelSpec:
    """Return the model as on one rank: equal for all TP sizes that can share state.

    The stride of pages in memory is left out, because it is not in an artifact's bytes. Group
    numbers stay: they order the layers.
    """
    return replace(model, layers=tuple(map(_whole_layer, model.layers)), tp_size=1)


def refusal(model: ModelSpec) -> str | None:
    """Return the reason why only engines of this TP size can use the state; None if all can."""
    for layer in model.stored_layers:
        if not layer.runs:
            return (
                f"how tensor parallelism cuts the {layer.state_type.value} state of "
                f"{layer.layer} is not known"
            )
    return None


def _part(layer: LayerSpec, tp_size: int, rank: int) -> int:
    """The rank's part: its own if there are as many parts as ranks.

    vllm/model_executor/layers/linear.py, `QKVParallelLinear`: `tp_rank // num_kv_head_replicas`.
    """
    return rank * layer.parts // tp_size


def _whole_layer(layer: LayerSpec) -> LayerSpec:
    size = layer.whole_page_bytes
    runs = tuple(run * layer.parts for run in layer.runs)
    return replace(layer, page_bytes=size, page_stride_bytes=size, parts=1, runs=runs)
