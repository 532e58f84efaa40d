"""Prefill and decode on different stock servers: a proxy, and a script that runs a fleet."""
