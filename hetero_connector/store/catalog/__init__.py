"""What is stored where: the index, slots, pins, eviction and the queues of work for the I/O thread.

No files and no threads here: time is a parameter, bytes are moved by others. To add an eviction
policy see `eviction`; to add a state type see `hetero_connector.spec.state_types`.
"""
