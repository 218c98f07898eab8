"""The rows of the table, each with its targets. Jobs have 1 KiB, results are stored, every write is fenced."""

from __future__ import annotations

from bench import latency, standing, submitting, throughput
from bench.row import Goal, Row

ROWS = (
    Row(
        "drain",
        "no-op jobs through one worker process",
        20_000,
        200,
        (
            Goal("jobs", "a second", at_least=8000),
            Goal("Redis in commands", "us a job", at_most=110),
            Goal("Redis in all", "us a job"),
            Goal("worker", "us a job"),
        ),
        throughput.drain,
    ),
    Row(
        "submit",
        "one by one, one producer, Client",
        10_000,
        50,
        (Goal("jobs", "a second", at_least=4500), Goal("producer", "us a job")),
        submitting.one_by_one,
    ),
    Row(
        "submit-async",
        "one by one, one producer, AsyncClient",
        10_000,
        50,
        (Goal("jobs", "a second", at_least=3500), Goal("producer", "us a job")),
        submitting.one_by_one_async,
    ),
    Row(
        "bulk",
        "a batch from memory",
        100_000,
        500,
        (Goal("lines", "a second", at_least=50_000), Goal("producer", "us a line")),
        submitting.bulk,
    ),
    Row(
        "slots",
        "jobs of 100 ms on 64 slots",
        5000,
        64,
        (Goal("time", "s", at_most=8.2), Goal("ideal", "s")),
        throughput.slots,
    ),
    Row(
        "start",
        "chat, from submit to start, idle worker",
        500,
        5,
        (
            Goal("p50", "ms", at_most=2.0),
            Goal("p99", "ms", at_most=4.0),
            Goal("bell p50", "ms"),
            Goal("bare loop p50", "ms"),
            Goal("bare loop p99", "ms"),
            Goal("times the bare loop", "", at_most=1.3),
        ),
        latency.idle,
    ),
    Row(
        "start-beside-batch",
        "the same while 20,000 batch jobs wait and run",
        500,
        5,
        (
            Goal("p50", "ms", at_most=2.2),
            Goal("p99", "ms", at_most=5.0),
            Goal("bell p50", "ms"),
            Goal("bare loop p50", "ms"),
            Goal("bare loop p99", "ms"),
            Goal("times the bare loop", ""),
        ),
        latency.beside_batch,
    ),
    Row(
        "memory",
        "Redis memory of a waiting job beside its payload",
        20_000,
        200,
        (Goal("a line of a batch", "bytes", at_most=200), Goal("a single job", "bytes", at_most=200)),
        standing.memory,
    ),
    Row(
        "kill",
        "SIGKILL of a worker to the end of its 8 jobs elsewhere",
        8,
        1,
        (Goal("time", "s", at_most=13),),
        standing.killed_worker,
    ),
    Row(
        "file",
        "llmq submit-batch of 1,000,000 lines",
        1_000_000,
        500,
        (
            Goal("lines", "a second", at_least=25_000),
            Goal("producer", "us a line"),
            Goal("memory", "MiB", at_most=150),
        ),
        submitting.file,
    ),
    Row(
        "idle",
        "commands of a worker with nothing to do",
        20,
        1,
        (Goal("commands", "a second", at_most=5), Goal("with those in scripts", "a second")),
        standing.idle_worker,
    ),
)
