"""Moving bytes between the DRAM arena and files or peers, and verifying what was moved.

Files: `base` is the contract (`FileTransfer`); `nixl_files`, `pread_files` and `memory_files`
implement it; `choose` picks one for this machine.

Peers: `peer_base` is the contract (`PeerTransfers`: one-sided reads of another engine's memory);
`nixl_peers` and `memory_peers` implement it. `nixl_peers` runs NIXL in a process of its own:
`peer_child` is that process as the engine sees it, `peer_process` its main loop, `peer_frames` the
messages between them, `peer_connection` the reads of one peer, `ucx_agent` the calls to NIXL.

A contract suite of tests runs on all implementations of a port: a new one needs an entry there.
May import `errors` only; no other package may import `nixl`.
"""
