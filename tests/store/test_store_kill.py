"""kill -9 during write-back: all that the journal lists afterwards is there and right."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.filling import Bench, begin, chain, ids_of, intact, put, stored, wait

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CHAINS = 40

CHILD = """
import sys
from pathlib import Path
from tests.store.filling import DENSE, SIZES, Bench, chain, ids_of, put
from benchmarks.known_peers import KnownPeers
from hetero_connector.store.peers.ports import PeerAccess
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
theirs, network = int(sys.argv[3]), MemoryNetwork()
peers = PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions))
store = Bench(Path(sys.argv[1])).open(
    dram_chunks=32, ssd_chunks=24, peers=peers if theirs else None
)
print("open", flush=True)
i = int(sys.argv[2])
while True:  # more than fits: slots are evicted and written again, too
    chunks = chain(f"c{i % 40}-{sys.argv[2]}", 3)
    mixes = [SIZES, {DENSE: SIZES[DENSE]}]  # zones go from one type to the other, and back
    if theirs:
        store.sharing.serve_under(9)  # nothing is written before it is known whose it is
    put(store, chunks, mixes[i // 8 % 2])
    if theirs:
        ours = dict.fromkeys(ids_of(chunks[theirs:]), 1)
        store.sharing.resolve_claims(ours, ids_of(chunks[:theirs]))
    i += 1
    if i % 4 == 0:
        store.flush(60)
        print(i, flush=True)
"""


@pytest.mark.parametrize("theirs", [0, 1], ids=["alone", "continuing others' chains"])
@pytest.mark.parametrize(
    "rounds", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_while_writing_back(tmp_path: Path, rounds: int, theirs: int) -> None:
    rng = random.Random(7)
    root = tmp_path / "ssd"
    found = 0
    for seed in range(rounds):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(seed), str(theirs)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        for _ in range(rng.randrange(1, 8)):
            child.stdout.readline()
        time.sleep(rng.random() * 0.02)
        child.kill()
        child.wait()
        child.stdout.close()
        found += check(root, seed, theirs)
    assert found > rounds, "the kills came before anything was stored: the test shows nothing"


def check(root: Path, seed: int, theirs: int) -> int:
    """Restore every artifact that is listed; returns how many chunks."""
    store = Bench(root).open(dram_chunks=32, ssd_chunks=24)
    store.check_integrity()
    chunks = 0
    for i in range(CHAINS):
        for earlier in range(seed + 1):
            trunk = chain(f"c{i}-{earlier}", 3)
            listed = [x for x in store.holdings(trunk) if x.tiers]
            assert all(trunk.index(x.chunk) >= theirs for x in listed)
            wanted = [j for x in listed for j in ids_of([x.chunk], x.tiers)]
            restore = wait(begin(store, wanted))
            assert not restore.failed
            assert len(restore.offsets) == len(wanted)
            assert intact(store, restore)
            restore.release()
            chunks += len(listed)
    put(store, chain(f"after{seed}", 3))
    assert store.flush(60)
    store.close()
    store = Bench(root).open(dram_chunks=32, ssd_chunks=24)
    assert stored(store, chain(f"after{seed}", 3)) == 3
    store.close()
    return chunks
