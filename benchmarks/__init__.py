"""Benchmarks of the library's speed: `python -m benchmarks --help`."""
