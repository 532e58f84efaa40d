"""A machine that breaks what it runs at every operation, from a seed, and judges what it serves.

    disk         what an operation meets (an error, a full disk, no end, a power cut), and what of
                 the files is left after a cut
    slabs        the store's slab files on such a disk
    journals     SQLite on such a disk
    oracle       which bytes may be served
    life         a seeded life of a store: faults, kills, and at last the end of all faults
    store_round  a life in which the store is used by its own calls
    engine_round a life in which an engine uses it: both sides of the connector, called as vLLM does
    small_engine vLLM's part of that engine, and a forward whose state is known
    failpoints   moments of an artifact's life at which a round may stop the machine
    fleet_round  one seeded life of three stores that share a directory
    kill_round   processes that are killed with -9, and what the next finds
    campaign     many rounds; `python -m tests.faults.campaign --seed N` plays one again

Every choice comes from the round's seed, so that a round that failed can be played again.
"""
