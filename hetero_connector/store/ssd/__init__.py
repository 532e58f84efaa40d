"""The SSD tier: the slab file, the journal, the lock on the directory, admission and write budget.

May import the catalog and `hetero_connector.transfer`. A file transfer is added in the latter.
"""
