"""The two numbers that order a fleet: epochs and fencing tokens."""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)
"""One registration of one worker. No two registrations share one; a worker's later one is
greater."""

Token = NewType("Token", int)
"""Fencing token: it grows with every change of the owner of an artifact or a session.

Tokens are comparable only between owners of the same thing. The same epoch keeps its token."""

NO_EPOCH = Epoch(0)
"""The owner of an artifact or session that has none."""

NO_TOKEN = Token(0)

LAST_NUMBER = 2**52
"""No directory hands out a greater epoch or token."""
