"""Benchmarks: each measures ratios against a reference in the same run. See README.md."""
