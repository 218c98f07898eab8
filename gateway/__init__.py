"""The OpenAI-compatible HTTP front of llmq: chat, files and batches for any OpenAI client."""
