"""Deciding what to restore. Pure: no engine, no I/O, no clock of its own.

Today one rule, the deepest boundary that can be restored exactly; a cost model that
may choose less, or nothing, plugs in at `plan_restore`. Imports `spec` and `artifacts`.
"""
