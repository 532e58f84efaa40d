"""The worker side: it copies pages to and from the arena, as the scheduler side orders.

One per tensor-parallel rank, in the process that runs the model. `worker_side.py` is the entry.
It does no I/O and decides nothing. To support another device, extend `pages.py` and `devices.py`.
"""
