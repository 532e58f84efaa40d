"""Examples that need no download: small checkpoints, servers on a CPU, a demo, a fleet."""
