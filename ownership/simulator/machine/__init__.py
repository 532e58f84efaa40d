"""A simulated worker: how fast it computes and moves bytes, and how it batches.

- `costs`: cost models from public figures of hardware and models. `channel`: drives and networks.
- `engine`: continuous batching with chunked prefill. `admission`: pages and restores.
- `worker`: an engine with its tiers. `request`: a request with its progress.

Costs are the planner's own model and classes. What is restored is the planner's decision, and where
a request runs is a scheduling policy's.
"""
