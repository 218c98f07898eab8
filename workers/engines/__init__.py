"""Inference engines, one module each: an OpenAI-compatible HTTP server, or a simulated GPU."""
