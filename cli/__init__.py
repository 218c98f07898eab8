"""The `llmq` command line: thin typer commands over the scheduler and the workers."""
