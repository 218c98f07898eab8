"""The queue itself: job model, Redis keys and scripts, batches, client API, embedded server."""
