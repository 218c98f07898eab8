"""Serve a GGUF file with llama.cpp's own OpenAI-compatible HTTP server, on a loopback port.

    python llamacpp_server.py MODEL --port N [--slots N] [--context N] [--threads N] [--embeddings 1]

The process that `local:MODEL.gguf` starts (`local.py`). It is run by its path and imports nothing of llmq, so that it
holds the model and little else. Its API key comes in a variable: arguments are for all users of the host to read.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

KEY_VARIABLE = "LLMQ_LOCAL_API_KEY"


def main() -> None:
    """Serve until SIGTERM."""
    options = _options()
    signals = {signal.SIGTERM, signal.SIGINT}
    # Before llama.cpp makes threads, which take over what is blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    import xllamacpp

    server = xllamacpp.Server(_params(xllamacpp, options))
    print("listening", server.listening_address, flush=True)
    signal.sigwait(signals)
    # A plain exit waits for the requests in flight, for 30 s and more.
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="tokens a slot")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--embeddings", type=int, default=0)
    return parser.parse_args()


def _params(xllamacpp: Any, options: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.model.stem}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    # llama.cpp divides its context by the slots.
    params.n_ctx = options.context * options.slots
    params.cont_batching = True
    # Else it keeps a copy of each prompt's state, up to 8 GiB, and looks through all of them for the next one.
    params.cache_ram_mib = 0
    params.endpoint_metrics = True
    params.endpoint_slots = True
    if options.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    if key := os.environ.get(KEY_VARIABLE):
        params.api_keys = [key]
    if options.embeddings:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    return params


if __name__ == "__main__":
    main()
