"""Request traces: one model of sessions and requests, and where they come from.

Owns the readers of recorded traces, the synthetic generator, the bootstrap and the statistics.
May import `hetero_connector.errors` and nothing else of the package. A new format is a reader
module that yields `Session`s and a line in `formats.py`.
"""
