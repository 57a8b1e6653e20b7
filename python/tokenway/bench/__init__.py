"""Benchmarks: model profiles, routing generators, and what measures with them."""
