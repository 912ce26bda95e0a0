"""Parity with mergekit: `python -m benchmarks.parity --help`."""
