"""Measuring code: models, timing and comparisons that the command line and benchmarks/ share."""
