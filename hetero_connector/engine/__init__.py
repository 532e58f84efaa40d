"""The only room that knows vLLM: the two sides of the connector.

The *scheduler side* (one per engine, in the engine core's process) matches prompts
against the store, decides what to restore and what to save, and tells the *worker
side* (one per tensor-parallel rank) which pages to copy from or to which arena bytes.
What an engine asks of a fleet that shares its cache is in `fleet.py`; `peer_matching.py` asks it.
The workers never do I/O and never decide; nothing they do can fail at run time.

To support another vLLM cache spec, extend `geometry.py`; another page memory (a new
device), `pages.py`.
"""
