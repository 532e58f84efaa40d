"""A router in a thread of this process, on a real socket, in front of stub workers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from ownership.router import serving
from ownership.router.config import RouterConfig, read_config
from ownership.router.placer import Placer
from tests.waiting import until

PATIENCE_S = 60.0
"""A deadline that a busy machine does not reach."""


def config_of(folder: Path, **keys: Any) -> RouterConfig:
    """Write and read a configuration; it probes often."""
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"host": "127.0.0.1", "port": 0, "probe_s": 0.05} | keys))
    return read_config(path)


class RunningRouter:
    """Use it as a context manager; inside, `num_ready` workers serve."""

    def __init__(
        self, config: RouterConfig, num_ready: int | None = None, placer: Placer | None = None
    ) -> None:
        listener = serving.open_listener(config)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.port = listener.getsockname()[1]
        self._server = serving.make_server(config, placer)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._num_ready = len(config.workers) if num_ready is None else num_ready
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    def __enter__(self) -> RunningRouter:
        self._thread.start()
        until(lambda: self._server.started)
        until(lambda: list(self.states().values()).count("up") == self._num_ready)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self.end()
        self._server.force_exit = error is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def picker_port(self) -> int:
        """The port of its endpoint picker."""
        app: Any = self._server.config.app
        return int(app.state.ext_proc_port)

    def end(self) -> None:
        """Tell it to end, as SIGTERM does."""
        self._server.should_exit = True

    def states(self) -> dict[str, str]:
        return dict(self.client.get("/ready").json()["workers"])

    def complete(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """Send a body with these fields; `stub` tells the worker what to do."""
        headers = fields.pop("headers", None)
        return self.client.post(path, json=fields, headers=headers)

    def stream(self, path: str = "/v1/completions", **fields: Any) -> str:
        """Return all events of a stream."""
        return self.complete(path, stream=True, **fields).text

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0.0 if there is none with these labels."""
        shown = ",".join(f'{k}="{v}"' for k, v in labels.items())
        start = (
            f"heterocache_router_{name}{{{shown}}} " if labels else f"heterocache_router_{name} "
        )
        lines = self.client.get("/metrics").text.splitlines()
        return float(next((x.removeprefix(start) for x in lines if x.startswith(start)), "0"))


def seen(url: str) -> dict[str, Any]:
    """Return what a stub worker has seen."""
    return dict(httpx.get(f"{url}/stub", timeout=PATIENCE_S, trust_env=False).json())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    return dict(json.loads(answer.content)["error"])
