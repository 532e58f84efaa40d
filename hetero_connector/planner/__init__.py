"""Deciding what to restore, and which boundaries to store. Pure: no engine, no I/O, no clock.

How a decision is made, in the order to read it:

- `plan`: the answer, a `RestorePlan`, and the rules that need no costs.
- `cost_fit`: learns seconds from samples. `compute_model` and `load_model` fit the engine's steps
  and its loads; `cost_model` bundles them with the weights and the overhead of requests.
- `boundaries`: bytes and tokens at every boundary of a chain, as arrays. `pricing` turns them into
  seconds, `decision` compares them, `planner` takes the cheapest; `explain` prints a decision.

Besides that: `profile` keeps a cost model in a file, `checkpoints` decides which boundaries to
store, `sessions` recognises conversations and predicts when their next turn is due.

May import `spec` and `artifacts`. A new term of the price goes into `CostTerms` and `Pricing`, a
new way to restore is another `Strategy` of `CandidateSet`, a new policy implements
`CheckpointPolicy`.
"""
