"""Benchmarks: every one checks its result before timing and appends a record under benchmark/results/."""
