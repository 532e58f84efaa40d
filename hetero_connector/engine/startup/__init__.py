"""Everything that is done once, when an engine starts: read its configuration, check it, open it.

`start.py` is the entry and the only module that connects all parts. Errors are raised here, and
say what to change. To support another vLLM cache spec, extend `geometry.py`.
"""
