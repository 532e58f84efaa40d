"""One engine's part in a fleet.

`FleetWorker` (made by `joining`) puts the parts together. `directory_thread` makes every call to
the directory, so that no step of the engine ever waits for one. On that thread `lease_keeper`
keeps the lease (`held_lease` is the worker's own view of it), `claim_queue` claims what the store
seals and releases what leaves it, `record_audit` finds records that were lost, and `chain_users`
shares which chains sessions use. `chain_lookup` asks which peers have a chain, `live_peers` and
`fencing` refuse what a former owner still serves.

May import `ownership.directory` and `hetero_connector`'s values, metrics and errors; never a store
or an engine: `shared_store` says what it needs of a store. `docs/internals/directory.md` lists the
rules that a worker has to follow.
"""
