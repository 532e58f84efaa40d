"""The log of a router's decisions: its lines, which routers write and the simulator reads.

Imports `ownership.scheduling`.
"""
