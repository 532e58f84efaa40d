"""The catalog of what is stored where: index, slots, pins, eviction, and the I/O thread's work.

No files and no threads here: time is a parameter, bytes are moved by others. To add an eviction
policy see `eviction`; to add a state type see `hetero_connector.spec.state_types`.
"""
