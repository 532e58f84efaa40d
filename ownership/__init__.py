"""OwnerServe: who owns each artifact of a fleet, and where a request runs.

- `directory`: the record of who owns what, its contract and its two implementations.
- `member`: one engine's part in a fleet. It keeps the lease, claims what is stored, looks up what
  peers have, and fences what it reads from them.
- `scheduling`: pure policies that place requests.
- `router`: one address in front of a fleet's servers; knows prompts, and which server has their
  state.
- `simulator`: replays traces over the same policies on a virtual clock.

`directory` imports none of the others, `member` and `scheduling` import `directory`, `router` these
two, `simulator` all but `router`. From `hetero_connector` they may import values (`artifacts`,
`spec`), metrics and errors, `scheduling` and `simulator` also the planner. None of them knows an
engine.
"""

from ownership.directory import Directory, MemoryDirectory

__all__ = ["Directory", "MemoryDirectory"]
