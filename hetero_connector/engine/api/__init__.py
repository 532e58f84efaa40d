"""Routes of vLLM's API server under `/v1/heterocache/`: clients of the engines' sockets.

An API server is a process of its own; there may be several, and several engines. Nothing here knows
the store or the scheduler: every question goes to an engine's socket, on the server's event loop
and without blocking it. Only this package of the engine's side imports a web framework.
"""
