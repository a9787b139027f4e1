"""Us beside every installed peer, in one run: ``python -m benchmarks --help``."""
