"""Moving bytes between the DRAM arena and files or peers, and checking what was moved.

Files: `base.py` is the contract (`FileTransfer`); `nixl_files.py`, `pread_files.py` and
`memory_files.py` implement it, `throttled_files.py` slows one down; `choose.py` picks one.
Peers: `peer_base.py` is the contract (`PeerTransfers`: one-sided reads of another engine's
memory), `nixl_peers.py` and `memory_peers.py` implement it.
One contract suite of tests runs on all of a kind: a new one needs an entry there and nothing
else. May import `errors.py`; `nixl` is imported nowhere else in the package.
"""
