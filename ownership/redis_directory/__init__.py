"""The directory of a fleet in Redis, Sentinel or Cluster: the only room that imports `redis`.

`directory` is the contract's implementation, its logic Lua scripts in `ownership/lua` that
`scripts` puts together; `connection` talks to Redis within a deadline, `address` is its URL,
`encoding` and `chain_chunks` turn bytes into records and distrust them.
"""

from ownership.redis_directory.address import RedisAddress
from ownership.redis_directory.directory import RedisDirectory

__all__ = ["RedisAddress", "RedisDirectory"]
