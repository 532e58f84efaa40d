"""OwnerServe's router: one address in front of many workers, for every client of their APIs.

- `serving` runs `app`, the Starlette application, in one or several processes; `http_protocol`
  limits what clients send before there is a request.
- `proxy` carries a request to a worker and the answer back: `requests` reads it, `admission` makes
  it wait for room, `placer` is the port to what chooses a worker, `answer` is the client's side.
- `workers` says which workers there are and what each has under way; `discovery` finds them,
  `probes` asks if they serve.
- `config` is the file and `config_values` its checks, `doors` the paths and their errors,
  `metrics` what is counted.
- `policy_placer` places by `ownership.scheduling`: `figures` are the workers' own costs, `reports`
  their own loads; `opening` makes it from the configuration, `decision_log` writes what it decided.
- `selection` and `ext_proc` are other faces: proxies that send themselves ask there where to, and
  `reservations` counts what they send. `ray_serve` is the same inside Ray Serve.
- `shared_ledger`: what several routers have under way, as each knows it; `peers` carries their
  messages through Redis.
- `fleet_page` shows the fleet to people and scripts: `history` has the newest requests, `stored`
  what workers store; the folder `page` is the browser's side of it.
- `spans` makes OpenTelemetry spans, if a collector is configured.
- `identity`: a request's tokens, and the names of its chunks, as the workers' connectors have them.
- `view`: which worker has how much of a request's state, and how sure that is.

The only package with a web framework besides an engine's own routes; no engine imports it. State
belongs to one event loop; processes of one router share the port, and their load as several routers
do. Needs the extra `router`.
"""
