"""OwnerServe: who owns each artifact of a fleet, and where a request runs.

Owns: the directory's contract (`directory`, `sessions`), the embedded directory
(`memory_directory`), the one in Redis (`redis_directory`, `lua`; `embedded_redis` is a private
server for tests and examples), and what keeps a data path honest: `held_lease` (may I still
serve?) and `fencing` (may I accept this?); one engine's part in a fleet (`fleet_worker`, made by
`joining`): `ledger` tells what it holds, `chain_lookup` asks what others hold, `live_peers` knows
them, `directory_thread` does all the talking; `scheduling`, the policies that place requests, and
`simulator`, what replays traces. May import `hetero_connector`'s values (`artifacts.record`,
`artifacts.exported`, `artifacts.peer_copy`, `spec`), metrics and errors, `scheduling` also its
planner; knows no engine. To add a directory: implement `Directory` and list it in `BENCHES` of
`tests/ownership/fleet_bench.py`.
"""

from ownership.directory import Directory
from ownership.memory_directory import MemoryDirectory

__all__ = ["Directory", "MemoryDirectory"]
