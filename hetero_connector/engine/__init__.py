"""The only package, with `connector.py`, that imports vLLM: the two sides of the connector.

The *scheduler side* (`scheduler/`, one per engine, in the engine core's process) matches prompts
against the store, decides what to restore and what to save, and tells the *worker side* (`worker/`,
one per rank of each pipeline stage) which pages to copy from or to which bytes of the arena. They
exchange the values in `messages.py`, once per engine step. `startup/` builds both sides from vLLM's
configuration. The other modules are the metrics on `/metrics` (`prometheus.py`), the guard around
vLLM's hooks (`hook_errors.py`) and `heterocache calibrate` (`calibration.py`).
"""
