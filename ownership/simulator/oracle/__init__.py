"""What no policy can do better than: an oracle that knows every request to come.

Owns which chunks a request must compute whatever happens (`first_use`, over the `family` of
requests that wait for each other), the least time that leaves for each request and session
(`bound`, a relaxation by `least_times`, with its proof; `result` for reports), what waiting for
engines adds to their mean (`shadow_price`, proved too), the best of all placements of a few
requests (`search`, exact), better placements than a policy's of some hundreds (`hindsight`, which
tries `changes`; no bound), and the most that any eviction policy can hit (`belady`, exact). May
import the simulator; of the simulator only `sweeps` imports it.
"""
