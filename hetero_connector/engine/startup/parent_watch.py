"""An engine core whose parent was killed ends, and releases what the next engine needs.

vLLM ends an engine core from the process that started it (the API server, or the launcher of
several), and an engine core ends its workers. Killed with -9, that process ends nothing: the
engine core would live on for nobody, with the SSD directory, its lease and the accelerator's
memory. So it asks itself to end as its parent would have asked, with SIGTERM: vLLM's own handler
aborts or drains what runs and shuts the connector down.
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
"""How vLLM names the process; in any other the engine's user may live on without its parent."""
_GRACE_S = 10.0


def watch(release: Callable[[], None], grace_s: float = _GRACE_S) -> threading.Thread | None:
    """Wait for the parent's end on a thread; None if this process is not vLLM's engine core.

    `release` is called on that thread if the process is still there `grace_s` after it was asked
    to end: it drains requests for longer, or hangs.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_ENGINE_CORE):
        return None

    def run() -> None:
        wait([parent.sentinel])
        logger.error(
            "process %s, which started this engine core, has ended without ending it: it ends now",
            parent.pid,
        )
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        logger.error("this engine core has not ended: it releases its cache")
        release()

    thread = threading.Thread(target=run, name="heterocache-orphan", daemon=True)
    thread.start()
    return thread
