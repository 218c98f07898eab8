"""Benchmarks: what llmq does in a second, and how long a person waits for it. `python -m bench` runs all of them."""
