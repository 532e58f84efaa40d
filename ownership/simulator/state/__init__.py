"""What state a simulated worker holds, and where.

Owns the chunks of prompts (`chunks`), what of them a tier holds (`resident`: a tree of `runs` of
chunks, emptied by the store's own eviction policies; `gapped`: an SSD's), whose they are in the
fleet (`owners`), a worker's tiers together (`memory`), what is restored of them (`restoring`: the
planner's decision) and what is sealed (`sealing`: the checkpoint policy's). May import
`hetero_connector`'s spec, artifacts, planner and store policies, `ownership.scheduling`'s values
and the traces; knows nothing of time.
"""
