"""Artifacts: the names of stored state, and the layout of its bytes.

Owns identity (`identity`: the model's fingerprint from its files, `model_files`; `generation`;
`chain`: the hash chain over a request's chunks; `canonical`: the bytes that all of these hash),
the records (`record`, and `copies` for other engines), the layout of an artifact's bytes
(`layout`, `tensor_parallel`) and the lookup of a chain's tail (`tails`).

Imports only `spec`, `errors` and `containers`; knows neither tiers' contents nor the engine. A new
input that can change the bytes of state goes into `Fingerprint` if it belongs to the model or the
engine, and into a chain's extra keys (`extra_keys`) if it belongs to a request.
"""
