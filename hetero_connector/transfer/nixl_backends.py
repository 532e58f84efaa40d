"""Finds the NIXL backends that start on this machine, for `heterocache doctor`.

Runs in a process of its own (`python -m hetero_connector.transfer.nixl_backends`), because some
plugins print, hang or abort if their hardware is missing.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from hetero_connector.errors import StoreError

_TIMEOUT_S = 60.0
_MARK = "working-backends:"
"""Marks our line of stdout. Plugins print there too, without ending their lines."""


def working_backends() -> dict[str, bool]:
    """Return, by the name of each installed NIXL plugin, whether it starts.

    Raises StoreError if NIXL cannot be imported or the process fails.
    """
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        raise StoreError(f"starting NIXL's backends took more than {_TIMEOUT_S:.0f} s") from e
    answer = run.stdout.rpartition(_MARK)[2].partition("\n")[0]
    if run.returncode != 0 or not answer:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise StoreError(f"NIXL does not work (exit {run.returncode}): {reason}")
    found: dict[str, bool] = json.loads(answer)
    return found


def _probe() -> dict[str, bool]:
    import nixl._api as nixl

    logging.getLogger("nixl").setLevel(logging.CRITICAL)
    found = {}
    listing = nixl.nixl_agent("doctor", nixl.nixl_agent_config(backends=[]))
    for plugin in sorted(listing.get_plugin_list()):
        agent = nixl.nixl_agent(f"doctor-{plugin}", nixl.nixl_agent_config(backends=[]))
        try:
            agent.create_backend(plugin)
        except Exception:  # nixl's exceptions derive from Exception only
            found[plugin] = False
        else:
            found[plugin] = True
    return found


if __name__ == "__main__":
    print(f"{_MARK}{json.dumps(_probe())}")
