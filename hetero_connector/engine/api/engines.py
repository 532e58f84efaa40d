"""Ask the engines of one API server, all at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_connector.engine.scheduler.status_socket import encode_request, short_address
from hetero_connector.engine.startup.rendezvous import sockets_of_server

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Answer = Mapping[str, Any]
_PATIENCE_S = 5.0


class Engines:
    """The engines that this API server sends requests to, as far as they run on its host."""

    def __init__(self, engine_id: str, launcher: int | None, count: int) -> None:
        """`engine_id`: of `kv_transfer_config`, which API servers and engines share. `launcher`:
        the process that started them; None where another one did, as under Ray. `count`: engines
        of the server, on all hosts.
        """
        self._engine_id = engine_id
        self._launcher = launcher
        self.count = count
        self._seen = set[Path]()

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Engines:
        """Return the engines of the API server that has this configuration."""
        assert vllm_config.kv_transfer_config is not None
        parallel = vllm_config.parallel_config
        parent = multiprocessing.parent_process()
        launcher = os.getpid() if parent is None else parent.pid
        return cls(
            str(vllm_config.kv_transfer_config.engine_id),
            None if parallel.data_parallel_backend == "ray" else launcher,
            int(parallel.data_parallel_size),
        )

    async def ask(
        self, question: Mapping[str, Any], timeout_s: float = _PATIENCE_S
    ) -> list[Answer]:
        """Return each engine's answer, or `{"error": text}` for one that gives none."""
        self._seen.update(sockets_of_server(self._engine_id, self._launcher))
        line = encode_request(question)
        return await asyncio.gather(*(_ask(path, line, timeout_s) for path in sorted(self._seen)))


async def _ask(path: Path, line: bytes, timeout_s: float) -> Answer:
    try:
        async with asyncio.timeout(timeout_s):
            answer = json.loads(await _exchange(path, line))
        if isinstance(answer, dict):
            return answer
        problem = "its answer is no object"
    except TimeoutError:
        problem = f"it has not answered within {timeout_s:.0f} s"
    except OSError as error:
        problem = f"it is gone, or its socket is ({error.strerror or error})"
    except ValueError:
        problem = "it ended the connection without an answer"
    return {"error": f"engine {path.stem}: {problem}"}


async def _exchange(path: Path, line: bytes) -> bytes:
    with short_address(path) as address:
        reader, writer = await asyncio.open_unix_connection(address)
    try:
        writer.write(line)
        await writer.drain()
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):  # the engine has closed it first
            await writer.wait_closed()
