"""The two numbers that order a fleet: epochs and fencing tokens."""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)
"""One life of one worker. No two registrations share one; a worker's later one is greater."""

Token = NewType("Token", int)
"""Fencing token: grows with every change of an artifact's, or a session's, owner.

Comparable only between owners of the same thing. The same epoch keeps its token."""

NO_EPOCH = Epoch(0)
"""Owner of what has no owner."""

NO_TOKEN = Token(0)

LAST_NUMBER = 2**52
"""No epoch or token is greater: one that is was handed out by no directory."""
