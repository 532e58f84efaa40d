"""Artifacts: what names stored state, and where its bytes lie.

Owns identity (`identity`: the model's fingerprint; `chain`: the hash chain over a
request's chunks; `canonical`: the bytes both are taken over), the records (`record`), the
layout of an artifact's bytes (`layout`), the prefix index (`index`, its `nodes`), what of it may
leave a tier (`standing`) and what may follow a chain's last full chunk (`tails`). Imports only
`spec`, `errors` and `metrics`; knows neither tiers nor the engine. A new thing that can change
the bytes of state goes into `Fingerprint` if it belongs to the model or the engine, into a
chain's extra keys if it belongs to a request.
"""
