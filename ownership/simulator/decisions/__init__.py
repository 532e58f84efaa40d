"""A router's log of decisions, looked at afterwards: `heterocache trace decisions`.

- `accuracy` compares what was predicted with what came, `policies` what was decided with what other
  policies decide on the same views.
- `command` prints both, and what the simulator makes of the whole log under each policy: a log is a
  trace, too (`traces.decision_file`, `traces.router_decisions`).

Imports `ownership.scheduling` and the simulator; no router.
"""
