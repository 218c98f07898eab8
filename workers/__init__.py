"""Workers: take a lease, run it against the engine of one GPU, settle the outcome."""
