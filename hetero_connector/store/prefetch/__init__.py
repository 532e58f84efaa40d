"""Staging a session's chain in DRAM before its next turn, if that pays.

The schedule of expected returns lies in the catalog; reads go through the SSD reader.
"""
