"""An engine without vLLM that serves its socket: a thread steps it whenever it has work."""

from __future__ import annotations

import threading
from typing import Any

from hetero_connector.engine.startup import rendezvous
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec import ModelSpec
from tests.engine.fakes import HYBRID, FakeRequest
from tests.engine.stepped import Engine

SUBJECT = ProfileSubject("Tiny", "digest", "float32", "", "auto", 1, "")


class SocketEngine:
    """Call `close`. The test runs requests with `run`; clients use `path`."""

    def __init__(
        self, name: str = "e", model_name: str = "m", model: ModelSpec = HYBRID, **options: Any
    ) -> None:
        """`options`: as for `Engine`."""
        self.engine = Engine(model, **options)
        self.path = rendezvous.status_path(name)
        ssd_dir = self.engine.store.catalog.config.ssd_dir
        about = {
            "model": model_name,
            "served_as": model_name,
            "engine": name,
            "pid": 4711,
            "heterocache": "0",
            "vllm": "0",
            "config": {"ssd_dir": None if ssd_dir is None else str(ssd_dir)},
        }
        self.engine.side.serve_status(
            self.path, about, lambda: CostProfile.of(self.engine.costs, model_name, SUBJECT)
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._step, daemon=True)
        self._thread.start()

    def run(self, request: FakeRequest) -> int:
        """Serve a request; return its restored tokens."""
        with self._lock:
            return self.engine.run(request)

    def serve(self, request: FakeRequest) -> None:
        """Serve a request up to its second token, so that status has its report."""
        with self._lock:
            self.engine.admit(request)
            rest = request.num_tokens - request.num_computed_tokens
            self.engine.step(**{request.request_id: rest})
            request.all_token_ids.append(7)
            self.engine.step(**{request.request_id: 1})
            self.engine.finish(request)

    def stored(self, request: FakeRequest) -> int:
        """Return the tokens that a new request with the same prompt would restore."""
        again = FakeRequest(
            f"{request.request_id}?", [*request.all_token_ids, 1], cache_salt=request.cache_salt
        )
        with self._lock:
            found = self.engine.answered(again)
            self.engine.finish(again)
            return found

    def leave_to_ssd(self) -> None:
        """Have everything on SSD alone."""
        assert self.engine.store.flush(10)
        self.engine.store.leave_to_ssd()

    def close(self) -> None:
        """End the engine; its store must be whole."""
        self._closed.set()
        self._thread.join()
        self.engine.store.check_integrity()
        self.engine.side.close()

    def _step(self) -> None:
        while not self._closed.wait(1e-3):
            with self._lock:
                if self.engine.side.has_work:
                    self.engine.step()
