"""Ray Serve LLM over engines that share one cache. `python -m examples.ray_serve fleet` starts it.

`app` builds what the YAML files describe, `backend` prepares each replica and each handoff,
`router` keeps sessions where their state is. `parameters` and `sessions` are the parts of these
that need no Ray, and `internals` is the only module that imports private modules of it.
"""
