"""Moving bytes between the DRAM arena and files or peers, and verifying what was moved.

Files: `base` is the contract (`FileTransfer`); `nixl_files` and `pread_files` implement it;
`choose` picks one for this machine.

Peers: `peer_base` is the contract (`PeerTransfers`: one-sided reads of another engine's memory);
`nixl_peers` implements it. It runs NIXL in a process of its own: `peer_child` is that process as
the engine sees it, `peer_process` its main loop, `peer_frames` the messages between them,
`peer_connection` the reads of one peer, `ucx_agent` the calls to NIXL.

`tests/transfer` implements both ports in memory (`memory_files`, `memory_peers`), with faults on
demand. A contract suite runs on all implementations of a port: a new one needs an entry there.
May import `errors` only; no other package may import `nixl`.
"""
