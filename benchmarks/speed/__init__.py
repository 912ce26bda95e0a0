"""Merges by mergepipe, by mergekit, and by nobody, who only reads and writes. See `python -m benchmarks --help`."""
