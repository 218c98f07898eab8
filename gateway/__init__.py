"""The OpenAI-compatible HTTP front of llmq: it is not part of this version."""
