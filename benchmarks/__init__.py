"""Figures of the package: each benchmark measures ratios against a reference in one run."""
