"""The simulator: traces in, the package's own policies on a virtual clock, figures out.

Owns what drives and what measures a simulated fleet. Nothing is decided here: planner, checkpoint,
eviction and scheduling policies are the classes that engines and routers run. May import the pure
rooms of `hetero_connector` (`spec`, `artifacts`, `planner`, `store` policies) and `ownership`;
never an engine. A new trace format goes into `traces/`. Needs the extra `sim`.
"""
