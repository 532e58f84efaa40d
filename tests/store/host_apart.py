"""One of two engines on hosts that are apart: a program that is told by lines of JSON what to do.

owner    stores CHUNKS, says where they are, and serves until its stdin ends
reader   for each line: reads CHUNKS from the owner, and says what arrived
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier
from hetero_connector.store.base import Wanted
from tests.store.filling import forget_all
from tests.store.peer_engine import BIG, CHUNKS, Writer, open_store, right

EPOCH = 7
DEADLINE_S = 3.0


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def own() -> None:
    store = open_store(KnownPeers())
    store.sharing.serve_under(EPOCH)
    writer = Writer(store)
    writer.put(CHUNKS)
    copies = writer.exported(EPOCH, CHUNKS)
    places = [
        [c.chunk.hex(), c.state_type, x.dram_offset, x.generation, x.size_bytes, x.checksum.hex()]
        for c, x in copies.items()
    ]
    say(card=store.sharing.card.hex(), places=places)
    sys.stdin.read()
    store.close()


def read() -> None:
    peers = KnownPeers()
    store = open_store(peers, peer_deadline_s=DEADLINE_S)
    kinds = {kind.value: kind for kind in BIG}
    contents = {ArtifactId(c.key, kind): data for c in CHUNKS for kind, data in right(c).items()}
    keys = {c.key.hex(): c.key for c in CHUNKS}
    say(ready=True)
    for line in sys.stdin:
        told = json.loads(line)
        peers.cards[EPOCH] = bytes.fromhex(told["card"])
        copies = {
            ArtifactId(keys[chunk], kinds[kind]): PeerCopy(
                EPOCH, offset, generation, size, bytes.fromhex(digest)
            )
            for chunk, kind, offset, generation, size, digest in told["places"]
        }
        remote = [StoredChunk(c, dict.fromkeys(BIG, Tier.PEER)) for c in CHUNKS]
        began_s = time.monotonic()
        restore = store.begin_restore([Wanted(kind, remote) for kind in BIG], copies)
        while not restore.poll() and time.monotonic() < began_s + 10 * DEADLINE_S:
            time.sleep(0.001)
        is_exact = all(
            np.array_equal(store.arena.view[at : at + BIG[a.state_type]], contents[a])
            for a, at in restore.offsets.items()
        )
        say(
            is_done=restore.poll(),
            is_exact=is_exact,
            arrived=len(restore.offsets),
            failed=sorted({str(cause) for cause in restore.failed.values()}),
        )
        restore.release()
        forget_all(store)
        time.sleep(1.1)  # a peer that failed is left alone for a second
    store.close()


if __name__ == "__main__":
    {"owner": own, "reader": read}[sys.argv[1]]()
