"""Sweeps: many simulations, run in parallel, and their report.

`running`: the points of a sweep and their results. `report`: tables over seeds. `command`:
`heterocache simulate`. A new thing to sweep is a field of `Point`.
"""
