"""Bounds and searches that show how good a placement or an eviction could be.

They know every request to come, so none of them is a policy, and no command of the package uses
them. `bound`: the least time of each request and session, a relaxation with its proof, by
`first_use`; `shadow_price`: what waiting for engines adds to the mean, proved too. `hindsight`: a
search for better placements than a policy's. `belady`: the most that an eviction policy can hit.
"""
