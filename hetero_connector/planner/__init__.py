"""Deciding what to restore, and which boundaries to store. Pure: no engine, no I/O, no clock.

Owns the cost model (`compute_model` and `load_model`, both learned from what really happened by
`least_squares`, and the machine's drift by `pace`, what loads wait for decodes by `staging_delay`;
`cost_model` bundles them, `cost_profile` keeps them in a file, for one `profile_subject`), the
planner (`restore_planner` asks `weighing`, which prices all `boundaries` at once by `pricing`,
their loads by `moving`; the answer is a `decision`, which `explain` prints, for an engine with
the journal's `engine_settings`), the rule without costs (`restore_plan`), the checkpoint
policies, and what is expected of sessions: which conversation a prompt continues
(`conversations`), when the next turn is due (`think_times`).
Imports `spec` and `artifacts`. A new term of the price goes into `CostTerms` and `Pricing`; a new
way to restore is another `Strategy` in `CandidateSet`.
"""
