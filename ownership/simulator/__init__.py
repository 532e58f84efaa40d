"""The simulator: traces in, the package's own policies on a virtual clock, figures out.

- `simulate`: the entry point. `simulation`: a fleet that serves sessions. `clock`: virtual time.
- `fleet_file`, `policies`, `workload`: the inputs besides a trace. `figures`: the output.
- `sessions`: closed loops that send requests. `routers`: what those know that place them.
- Folders: `state` is what a worker holds, `machine` how fast it is, `sweeps` many simulations and
  their report, `traces` where requests come from.

The simulator makes no decisions: planner, checkpoint, eviction and scheduling policies are the
classes that engines and routers run. May import the pure packages of `hetero_connector` (`spec`,
`artifacts`, `planner`, `store` policies) and `ownership.scheduling`; never an engine. A new figure
is a field of `Figures`. Needs the extra `sim`.
"""
