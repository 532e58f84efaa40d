"""The scheduler side: it matches prompts, decides what to restore and what to save, and orders it.

One per engine, in the engine core's process, on vLLM's scheduling thread. `scheduler_side.py` is
the entry: it calls the other modules in the order of vLLM's hooks. It owns the store and imports
nothing of the worker side; the two exchange the values of `messages.py`.
"""
