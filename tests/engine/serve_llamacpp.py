"""Serve a GGUF file with llama.cpp's own OpenAI-compatible HTTP server, on a free loopback port.

    python tests/engine/serve_llamacpp.py MODEL [--slots N] [--context N] [--port N] [--api-key K] [--embeddings]

Prints `listening http://127.0.0.1:PORT` when it serves, and ends on SIGTERM, SIGINT, or when its stdin is closed, so
that it cannot outlive the test run that started it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

import xllamacpp

ALIAS = "tiny"


def main() -> None:
    """Serve until told to stop."""
    options = _options()
    server = xllamacpp.Server(_params(options))
    print("listening", server.listening_address, flush=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_wait_for_parent, args=(stop,), daemon=True).start()
    stop.wait()
    # A plain exit waits for the requests in flight, for 30 s and more.
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048, help="tokens a slot")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key")
    parser.add_argument("--embeddings", action="store_true")
    return parser.parse_args()


def _params(options: argparse.Namespace) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {ALIAS}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    # llama.cpp divides its context by the slots.
    params.n_ctx = options.context * options.slots
    params.cont_batching = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0  # else it copies every prompt into memory, and gets slower and larger with each
    params.endpoint_metrics = True
    params.endpoint_slots = True
    if options.api_key:
        params.api_keys = [options.api_key]
    if options.embeddings:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    return params


def _wait_for_parent(stop: threading.Event) -> None:
    """Wait for the end of stdin: it closes when the parent lets go of it, also when that is killed."""
    while sys.stdin.buffer.read(4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
