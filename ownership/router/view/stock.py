"""Workers without the connector: the prefixes they have, by the KV events they publish."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ownership.router.identity import ChainNaming, Prompt, PromptChain
from ownership.router.view.block_index import block_naming
from ownership.router.view.certainty import Reason
from ownership.router.view.event_stream import EventStream
from ownership.scheduling.step import WorkerPrefix

Streams = Callable[[str], list[EventStream]]
"""A server's name -> the streams of its engines."""


class StockWorkers:
    """The workers that are known by their events. Used on the event loop, read by any thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._servers: dict[str, frozenset[str]] = {}
        """The names that each has for the model without an adapter."""

    @property
    def servers(self) -> Collection[str]:
        """The names of the servers."""
        return self._servers.keys()

    def told(self, server: str, base_models: Collection[str]) -> None:
        """A server publishes events, and serves the model by these names without an adapter."""
        self._servers[server] = frozenset(base_models)

    def forget(self, server: str) -> None:
        """Drop a server that has left, or is known otherwise."""
        self._servers.pop(server, None)

    def instances(self, server: str) -> frozenset[str]:
        """Return what tells the server's running engines from those after a restart."""
        streams = self._streams(server)
        return frozenset(f"stream {id(x)} {x.restarts}" for x in streams)

    def reasons(self, now_s: float) -> set[Reason]:
        """Return what is wrong with the events of the fleet as a whole."""
        found = set[Reason]()
        for server in list(self._servers):
            streams = self._streams(server)
            if not streams or any(x.is_silent(now_s) for x in streams):
                found.add(Reason.EVENTS_SILENT)
            elif not all(x.is_whole for x in streams):
                found.add(Reason.EVENTS_LOST)
            if not all(x.is_readable and x.index.is_understood for x in streams):
                found.add(Reason.EVENTS_UNREADABLE)
        return found

    def namings(self, prompt: Prompt) -> set[ChainNaming]:
        """Return the namings that a prompt's chain has at these servers."""
        return {
            self._naming(prompt, base_models, stream)
            for server, base_models in list(self._servers.items())
            for stream in self._streams(server)
            if stream.index.block_size
        }

    def prefixes(
        self, prompt: Prompt, chains: Mapping[ChainNaming, PromptChain]
    ) -> dict[str, WorkerPrefix]:
        """Return the longest prefix of any engine of each server that has one."""
        found: dict[str, WorkerPrefix] = {}
        for server, base_models in list(self._servers.items()):
            for stream in self._streams(server):
                if not stream.index.block_size:
                    continue
                chain = chains.get(self._naming(prompt, base_models, stream))
                prefix = WorkerPrefix() if chain is None else stream.index.prefix(chain.keys)
                if prefix.local_tokens > found.get(server, WorkerPrefix()).local_tokens:
                    found[server] = prefix
        return found

    def _naming(
        self, prompt: Prompt, base_models: frozenset[str], stream: EventStream
    ) -> ChainNaming:
        is_base = prompt.model is None or prompt.model in base_models
        adapter = "" if is_base else str(prompt.model)
        return block_naming(stream.index.block_size, prompt.salt or None, adapter)
