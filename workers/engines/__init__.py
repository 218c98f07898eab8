"""Inference engines: an OpenAI-compatible HTTP server, one that llmq starts itself, or a simulated GPU."""
