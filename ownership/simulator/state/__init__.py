"""The state of a simulated worker: which chunks and checkpoints it has, and in which tier.

- `shape`: sizes of a model's state. `chunks`: the chunks of a prompt.
- `runs`, `resident`: one tier as a tree of runs of chunks, emptied by the store's own eviction
  policies. `sparse`: the same for an SSD, which may miss chunks.
- `owners`: the owner of each chunk in the fleet. `memory`: all tiers of a worker.
- `restoring`: the planner's decision. `checkpoints`: the boundaries that are kept.

May import spec, artifacts, planner and store policies of `hetero_connector`, the values of
`ownership.scheduling`, and the traces. Knows nothing of time.
"""
