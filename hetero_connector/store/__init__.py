"""The artifact store: sealed KV state in DRAM and on SSD, found again by its prefix.

- `catalog`: what is stored where, and what the I/O thread has to do next, under one lock.
- `ssd`: the slab file, the journal, reads and writes of our own SSD tier.
- `peers`: reads of other engines' DRAM and of what dead engines left, and the fleet's view of us.
- `artifact_store`: the store, as the engine's scheduler side calls it; `base` has the values that
  they exchange, `arena` is the DRAM tier's memory.
- `io_thread`: the thread that moves bytes and makes checksums; a `batch_runner` for each device.
  Calls that may hang have threads of their own: the journal's, the generation file's, adoption's.

May import `artifacts`, `spec` and `transfer`; knows no engine. To add an eviction policy see
`catalog.eviction`; to add a tier: a `record.Tier`, a `SlotPool` for it in `catalog.tiers`, a
`loads.Source`, and a device for `BatchRunner`.
"""
