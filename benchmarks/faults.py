"""`python -m benchmarks.faults [--json]`: rounds of injected faults, and what big tiers cost.

`rounds`, and of them `wrong_answers`, `hangs`, `engine_deaths` and `stuck`, which must be 0: see
`tests/faults`. `open_s_per_million_rows`: to open an SSD tier. `bytes_per_chunk`: what its index
takes in memory for a chunk of two state types. `gc_pause_ms`: the longest garbage collection with
half a million chunks, after they were loaded and while more are added. `evict_us_4000_holds`: an
eviction while 4,000 restores wait, on average. Seconds of the processor, see `big_tiers`.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.big_tiers import EVICTIONS, HOLDS, evict_under_holds, open_big_tier
from benchmarks.measure import machine_line, rounded, save, table
from tests.faults.campaign import run_campaign


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the big tier's journal")
    arguments = parser.parse_args()
    tier = open_big_tier(arguments.rows)
    evictions = evict_under_holds()
    campaign = run_campaign(arguments.rounds, arguments.seed)
    pause_s = max(tier.full_collection_s, tier.longest_collection_s)
    counted = {
        "rounds": campaign.rounds,
        "wrong_answers": campaign.wrong_answers,
        "hangs": campaign.hangs,
        "engine_deaths": campaign.engine_deaths,
        "stuck": campaign.stuck,
    }
    measured = {
        "open_s_per_million_rows": tier.open_s_per_million_rows,
        "bytes_per_chunk": tier.bytes_per_chunk,
        "gc_pause_ms": 1e3 * pause_s,
        "evict_us_4000_holds": 1e6 * evictions.mean_s,
    }
    figures = counted | rounded(measured)
    rows = [
        ["a million journal rows", f"{tier.open_s_per_million_rows:.2f} s to open"],
        ["a chunk of two types on SSD", f"{tier.bytes_per_chunk:.0f} bytes of memory"],
        ["a full collection after opening", f"{1e3 * tier.full_collection_s:.1f} ms"],
        ["the longest while it grows", f"{1e3 * tier.longest_collection_s:.1f} ms"],
        [f"an eviction under {HOLDS:,} holds", f"{1e6 * evictions.mean_s:.1f} us on average"],
        [f"of {EVICTIONS}: the median", f"{1e6 * evictions.median_s:.1f} us"],
        ["the worst, the first that asks", f"{1e6 * evictions.worst_s:.1f} us"],
        ["rounds with faults", f"{campaign.rounds:,}"],
        *([name.replace("_", " "), str(counted[name])] for name in list(counted)[1:]),
    ]
    text = f"{machine_line()}; {arguments.rows:,} rows\n\n{table(['what', 'figure'], rows)}"
    print(text)
    details = {"tier": vars(tier), "evictions": vars(evictions), "findings": campaign.findings}
    print(f"\nwritten: {save('faults', text, figures, details)}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
