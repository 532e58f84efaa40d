"""The worth of what is known about a prompt's state, and the reasons that lessen it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Certainty(StrEnum):
    """The worth of what is known about a prompt's state."""

    EXACT = "exact"
    """The chain is the workers' own, as their answers have shown, and the directory was asked."""
    DEGRADED = "degraded"
    """Something is known, but it may be wrong or too little."""
    BLIND = "blind"
    """Nothing is known: the prompt counts as stored nowhere."""


class Reason(StrEnum):
    """Reasons besides those of the prompt itself (`identity.Doubt`)."""

    NO_PROMPT = "no_prompt"
    """The request has no prompt that is read."""
    PROMPT_LATE = "prompt_late"
    """The prompt was not named in time: it is very long, or many are named at once."""
    NO_CHAINS = "no_chains"
    """No server has told how it names chains: none has the connector, or none answers."""
    SERVER_SILENT = "server_silent"
    """A server has not told it, or not lately; it may have no connector."""
    UNCHECKED = "unchecked"
    """A server's own answers were not compared with the router's yet."""
    TOKENS_DIFFER = "tokens_differ"
    """A server made other tokens: another tokenizer, revision or chat template."""
    KEYS_DIFFER = "keys_differ"
    """A server named the same tokens otherwise: its root, a salt or an adapter has changed."""
    TOKENIZER_DIFFERS = "tokenizer_differs"
    """A server's tokenizer has other files than the router's."""
    MIXED = "mixed"
    """Servers name chains differently: their versions, models or settings differ."""
    RESET_ALONE = "reset_alone"
    """An engine was reset by itself, or has weights of its own: it shares no state."""
    SLEEPING = "sleeping"
    """A server sleeps (vLLM's sleep mode): its engine's cache is gone."""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """No server has told the adapter's digest yet."""
    EVENTS_LOST = "events_lost"
    """KV events of a worker were lost and are not repeated: part of its blocks is not known."""
    EVENTS_SILENT = "events_silent"
    """A worker's KV events are not read yet, or it does not say if there are more."""
    EVENTS_UNREADABLE = "events_unreadable"
    """A worker's KV events are of another version, or of a kind of state without a rule here."""
    NO_DIRECTORY = "no_directory"
    """The fleet has no directory."""
    NOT_IN_DIRECTORY = "not_in_directory"
    """A server's engine has no live lease in the router's directory: its state is not found."""
    DIRECTORY_LATE = "directory_late"
    """The directory did not answer within its deadline, or is given a pause after that."""
    DIRECTORY_FAILED = "directory_failed"
    """The directory's answer was an error."""
    PEERS_LOST = "peers_lost"
    """Messages cannot be exchanged with the other routers. Nothing new is known of their load."""
    PEER_GAP = "peer_gap"
    """A router's messages were lost, and it has not repeated them yet."""
    PEER_DIFFERS = "peer_differs"
    """A router sends messages of another version."""


def certainty(reasons: Iterable[str], *, knows_anything: bool) -> Certainty:
    """Return the certainty that these reasons leave."""
    if not knows_anything:
        return Certainty.BLIND
    return Certainty.DEGRADED if any(True for _ in reasons) else Certainty.EXACT
