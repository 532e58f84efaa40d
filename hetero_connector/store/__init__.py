"""The artifact store: sealed KV state in DRAM and on SSD, found again by its prefix.

Owns: which artifact is in which slot (`tiers`, `slots`), what leaves first (`eviction`) and
last (`readers`), what is worth writing to SSD (`admission`, `write_budget`), what is brought
back to DRAM before it is asked for (`prefetch_schedule`, `prefetch_weighing`, `prefetching`),
what peers may read of this engine and how it reads from them (`peers`, `peer_reading`,
`slot_table`, `exporting`), what its fleet is told and says (`sharing`, `unjudged`), how long
copies of what others own stay (`replicas`),
the DRAM arena (`arena`), the SSD directory and its journal, and the I/O thread that is
the only one to touch them (`io_thread`). May import `artifacts`, `spec` and `transfer`;
knows no engine.

To add an eviction policy see `eviction`; to add a tier: a `record.Tier`, a `SlotPool`
for it in `tiers`, and the moving of bytes in `io_thread`. The contract is `base`.
"""
