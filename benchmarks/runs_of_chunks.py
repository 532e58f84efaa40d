"""Measure why the simulator keeps runs of chunks where the engine keeps chunks.

`python -m benchmarks.runs_of_chunks [--json]`

Random sessions go through one tier of the simulator and through the engine's own catalog, with DRAM
alone and no bytes. `runs_us_per_prompt` and `catalog_us_per_prompt`: microseconds of processor time
to find a prompt, use what is there, and add the rest, evicting what must leave.
`catalog_over_runs`: their ratio. Both must hold the same chunks at the end, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from benchmarks.measure import machine_line, publish, rounded, table
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Save, StoreConfig, Wanted
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.eviction import LeafLru
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.tiers import Tiers
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import ChunkSizes
from ownership.simulator.traces.block_runs import BlockRuns

KIND = StateType.DENSE_KV
CHUNK = 512
SLOT_BYTES = 4096
CAPACITY = 4_000
"""Chunks that the tier has room for: about a third of what the sessions bring."""
PROMPTS = 4_000
_ROUNDS = 3


def sessions(count: int) -> list[BlockRuns]:
    """Return prompts of sessions: new ones of 8 to 40 chunks, later turns with 1 to 8 more."""
    random, live, prompts = Random(1), list[list[int]](), list[BlockRuns]()
    for number in range(count):
        new = range(64 * number, 64 * number + 64)
        if live and random.random() < 0.6:
            turn = random.randrange(len(live))
            live[turn] = live[turn] + list(new[: random.randint(1, 8)])
        else:
            turn = random.randrange(200)
            live[turn : turn + 1] = [list(new[: random.randint(8, 40)])]
            turn = min(turn, len(live) - 1)
        prompts.append(BlockRuns.of_ids(live[turn]))
    return prompts


def in_runs(prompts: Sequence[BlockRuns]) -> set[int]:
    """Add the prompts to a tier of the simulator; return the ids of the chunks it has."""
    tier = ResidentChunks(ChunkSizes(CHUNK, 1, 0), CAPACITY, LeafLru(), KIND)
    for tick, prompt in enumerate(prompts, 1):
        tier.add(prompt, prompt.num_blocks, (), tick)
    return {run.first + i for run in tier.runs() for i in range(run.count)}


def in_catalog(chains: Sequence[Sequence[ChunkRange]]) -> set[int]:
    """Add the prompts to the engine's catalog; return the ids of the chunks it has."""
    tiers = Tiers(CHUNK, SlotGeometry(CAPACITY, {KIND: SLOT_BYTES}), None, Recorder())
    config = StoreConfig(dram_bytes=CAPACITY * SLOT_BYTES)
    catalog = Catalog(tiers, config, Recorder(), lambda: 0.0, Generation())
    for chain in chains:
        found = catalog.match(chain)
        restore = catalog.begin_restore([Wanted(KIND, found)], {})
        for chunk in chain[len(found) :]:
            save = catalog.reserve(chunk, {KIND: SLOT_BYTES})
            if not isinstance(save, Save):
                break
            catalog.seal(save)
        restore.release()
    return {_number(artifact.node.key) for artifact in tiers.index.artifacts()}


def _chain(prompt: BlockRuns) -> list[ChunkRange]:
    keys = [ROOT, *(ChunkKey((i + 1).to_bytes(16, "little")) for i in prompt.ids().tolist())]
    return [
        ChunkRange(key, parent, at * CHUNK, (at + 1) * CHUNK)
        for at, (parent, key) in enumerate(pairwise(keys))
    ]


def _number(key: ChunkKey) -> int:
    return int.from_bytes(key, "little") - 1


def _least_s(job: Callable[[], object]) -> float:
    """Return the least processor seconds of a few rounds: others only ever slow it down."""
    seconds = []
    for _ in range(_ROUNDS):
        began_s = time.process_time()
        job()
        seconds.append(time.process_time() - began_s)
    return min(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runs_of_chunks")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    prompts = sessions(PROMPTS)
    chains = [_chain(prompt) for prompt in prompts]
    if in_runs(prompts) != in_catalog(chains):
        raise RuntimeError("the two tiers hold different chunks")
    runs_s, catalog_s = _least_s(lambda: in_runs(prompts)), _least_s(lambda: in_catalog(chains))
    figures = rounded(
        {
            "runs_us_per_prompt": runs_s / PROMPTS * 1e6,
            "catalog_us_per_prompt": catalog_s / PROMPTS * 1e6,
            "catalog_over_runs": catalog_s / runs_s,
            "chunks_per_prompt": sum(map(len, chains)) / PROMPTS,
        }
    )
    rows = [[name, str(value)] for name, value in figures.items()]
    text = f"{machine_line()}\n\n{table(['figure', 'value'], rows)}"
    publish("runs_of_chunks", text, figures, {}, as_json=arguments.json)


if __name__ == "__main__":
    main()
