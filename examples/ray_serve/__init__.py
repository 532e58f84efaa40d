"""Ray Serve LLM over engines that share one cache. `python -m examples.ray_serve fleet` starts it.

`app` builds what the YAML files describe, with the package's router; `backend` prepares each
replica and each handoff, `server` tells routers what a replica knows. `parameters` are the parts
that need no Ray, and `internals` is the only module that imports private modules of it.
"""
