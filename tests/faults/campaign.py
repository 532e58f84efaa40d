"""Many rounds, each from its own seed: `python -m tests.faults.campaign --rounds 1000`.

Prints what was found, how to play it again, and all figures as one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.faults.engine_round import EngineRound
from tests.faults.fleet_round import FleetRound
from tests.faults.kill_round import KillRound
from tests.faults.life import Verdict
from tests.faults.store_round import StoreRound

PATIENCE_S = 120.0
"""A round that has not ended by then hangs: it takes seconds."""
THREADED_ONE_IN = 8
"""Rounds with the store's own I/O thread, which are slower and not the same each time."""
ENGINE_ONE_IN = 3
"""Rounds in which both sides of the connector use the store."""
FLEET_ONE_IN = 40
"""Rounds of three stores with a directory, which take seconds."""
KILL_ONE_IN = 50
"""Rounds of processes that are killed with -9."""
_COUNTS = ("injected", "reached")


@dataclass
class CampaignResult:
    """The findings of all rounds."""

    rounds: int = 0
    wrong_answers: int = 0
    """Artifacts served with bytes that are not theirs, or not any more."""
    hangs: int = 0
    """Rounds that did not end."""
    engine_deaths: int = 0
    """Errors that reached the scheduler, and I/O threads that ended."""
    stuck: int = 0
    """The things that were not in order again after all faults had ended."""
    failed: list[int] = field(default_factory=list)
    """Seeds of the rounds that found something."""
    findings: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    """Faults, as `operation:fate`."""
    reached: Counter[str] = field(default_factory=Counter)
    """Moments of `failpoints`, and how often they came."""

    @property
    def is_clean(self) -> bool:
        """Return whether no round found anything."""
        return not self.failed

    def report(self) -> str:
        """Say what was found, and how to play it again."""
        again = "python -m tests.faults.campaign --rounds 1 --seed"
        return "\n".join([*self.findings, *(f"again: {again} {seed}" for seed in self.failed)])

    def as_json(self) -> str:
        """All of it on one line."""
        counts = {name: dict(sorted(getattr(self, name).items())) for name in _COUNTS}
        return json.dumps(vars(self) | counts)

    def add(self, verdict: Verdict) -> None:
        """Count a round."""
        self.rounds += 1
        self.wrong_answers += len(verdict.wrong_answers)
        self.engine_deaths += len(verdict.engine_deaths)
        self.stuck += len(verdict.stuck)
        self.injected += verdict.injected
        self.reached += verdict.reached
        if not verdict.is_good:
            self.failed.append(verdict.seed)
            found = [*verdict.wrong_answers, *verdict.engine_deaths, *verdict.stuck]
            self.findings += (f"seed {verdict.seed}: {what}" for what in found)


def run_campaign(rounds: int, seed: int, budget_s: float | None = None) -> CampaignResult:
    """Play the rounds of seeds `seed`, `seed + 1`, ...; no new one once `budget_s` have passed."""
    result = CampaignResult()
    ends_s = float("inf") if budget_s is None else time.monotonic() + budget_s
    for number in range(seed, seed + rounds):
        if time.monotonic() >= ends_s:
            break
        verdict = _in_time(round_of(number).run)
        if verdict is None:
            result.rounds += 1
            result.hangs += 1
            result.failed.append(number)
            result.findings.append(f"seed {number}: the round did not end")
        else:
            result.add(verdict)
    return result


def round_of(seed: int) -> StoreRound | EngineRound | FleetRound | KillRound:
    """The round that a seed stands for."""
    if seed % FLEET_ONE_IN == 0:
        return FleetRound(seed)
    if seed % KILL_ONE_IN == 0:
        return KillRound(seed)
    if seed % ENGINE_ONE_IN == 0:
        return EngineRound(seed)
    return StoreRound(seed, threaded=seed % THREADED_ONE_IN == 0)


def seed_of_the_day() -> int:
    """The same for everybody on one day (UTC), another the next: YYYYMMDD000."""
    return int(f"{datetime.now(UTC):%Y%m%d}000")


def _in_time(play: Callable[[], Verdict]) -> Verdict | None:
    """The round's verdict; None if it hangs, with every thread's stack on stderr."""
    ended = Future[Verdict]()

    def run() -> None:
        try:
            ended.set_result(play())
        except Exception as error:  # of the machine's own: a store's are in the verdict
            ended.set_exception(error)

    threading.Thread(target=run, name="faults-round", daemon=True).start()
    if not wait([ended], PATIENCE_S).done:
        faulthandler.dump_traceback(sys.stderr)
        return None
    return ended.result()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=None, help="default: that of the day")
    parser.add_argument("--seconds", type=float, default=None, help="start no round after these")
    args = parser.parse_args()
    seed = seed_of_the_day() if args.seed is None else args.seed
    print(f"seeds from {seed}", flush=True)
    result = run_campaign(args.rounds, seed, args.seconds)
    if not result.is_clean:
        print(result.report())
    print(result.as_json())
    sys.exit(0 if result.is_clean else 1)


if __name__ == "__main__":
    main()
