"""End an engine core whose parent process was killed.

vLLM stops an engine core from the process that started it (the API server, or the launcher of
several), and an engine core stops its workers. If the parent is killed with -9, the engine core
would run on without use and keep the SSD directory, its lease and the accelerator's memory. So it
sends itself SIGTERM, as its parent would: vLLM's handler then aborts or drains the requests and
shuts the connector down.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

logger = logging.getLogger("vllm.heterocache")

_ENGINE_CORE = "EngineCore"
"""vLLM's name of the process. Other processes belong to the user and may outlive their parent."""
_GRACE_S = 10.0


def watch_parent(release: Callable[[], None], grace_s: float = _GRACE_S) -> threading.Thread | None:
    """Start a thread that waits for the parent's end; None if this is not vLLM's engine core.

    The thread calls `release` if this process still runs `grace_s` after its SIGTERM, because it
    drains requests or hangs.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_ENGINE_CORE):
        return None

    def run() -> None:
        wait([parent.sentinel])
        logger.error(
            "process %s, which started this engine core, has ended: the engine core stops now",
            parent.pid,
        )
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        logger.error("this engine core has not stopped in time: it releases its cache")
        release()

    thread = threading.Thread(target=run, name="heterocache-parent-watch", daemon=True)
    thread.start()
    return thread
