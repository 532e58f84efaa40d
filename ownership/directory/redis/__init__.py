"""The directory of a fleet in Redis, Sentinel or Cluster: the only package that imports `redis`.

`directory` implements the contract; its logic is the Lua scripts in `lua`, which `scripts` puts
together. `connection` talks to Redis within a deadline and `address` parses its URL. `encoding`
and `chain_chunks` turn stored bytes into records and check them, for others can write there too.
`message_log` carries what the routers of a fleet tell each other.
"""

from ownership.directory.redis.address import RedisAddress
from ownership.directory.redis.directory import RedisDirectory
from ownership.directory.redis.message_log import RedisMessageLog

__all__ = ["RedisAddress", "RedisDirectory", "RedisMessageLog"]
