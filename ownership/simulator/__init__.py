"""The simulator: traces in, the package's own policies on a virtual clock, figures out.

Owns what drives and what measures a simulated fleet: the clock, the sessions that send requests
(`sessions`, `workload`), the fleet's file (`fleet_file`), what is compared (`policies`), carrying
out what a policy decides (`simulation`, `replicating`), the figures (`results`, `measuring`), and
`simulate` (`simulating`). `state` is what workers hold, `machine` how fast they are, `sweeps` many
simulations and their report, `traces` where requests come from. Nothing is decided here: planner,
checkpoint, eviction and scheduling policies are the classes that engines and routers run. May
import the pure rooms of `hetero_connector` (`spec`, `artifacts`, `planner`, `store` policies),
`ownership.scheduling` and the directory's groups; never an engine. A new figure is a field of
`Figures`. Needs extra `sim`.
"""
