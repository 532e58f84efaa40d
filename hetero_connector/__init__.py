"""HeteroCache: typed KV-state caching for one vLLM engine."""
