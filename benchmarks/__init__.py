"""What the library's speed is measured with: `python -m benchmarks --help`."""
