"""The second process of `processes.check_two_processes`."""

from __future__ import annotations

import sys

from benchmarks.gpu_check.processes import turn_pages_around
from benchmarks.gpu_check.running import setting_of
from benchmarks.gpu_check.setting import SMALL
from hetero_connector.store.arena import ArenaHandle

if __name__ == "__main__":
    path, size_bytes, device = sys.argv[1:]
    handle = ArenaHandle(path, int(size_bytes))
    with setting_of(SMALL, dry_run=device == "cpu", handle=handle) as setting:
        turn_pages_around(setting)
