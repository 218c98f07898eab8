"""llmq: chat and batch LLM work on the same GPUs, queued on Redis Streams."""
