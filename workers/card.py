"""The card: what a worker says of itself, in every heartbeat and in its `ready` line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from llmq.workers.engines.base import EngineInfo
from llmq.workers.governing import Governing
from llmq.workers.measuring import Measuring
from llmq.workers.slots import Slots, count_interactive


@dataclass(slots=True)
class Card:
    """A worker's own figures. `state` is starting, ready, engine_down or draining; times are of this host's clock."""

    worker_id: str
    host: str
    queue: str
    gpu: str
    engine: EngineInfo
    state: str = "starting"
    started_at: float = field(default_factory=time.time)
    version: str = field(default_factory=lambda: version("llmq-streams"))

    def heartbeat(self, slots: Slots, measuring: Measuring, governing: Governing) -> Mapping[str, str | int]:
        """Return the fields of a heartbeat; the lease thread calls this."""
        running = slots.running()
        interactive = count_interactive(running)
        return {
            "id": self.worker_id,
            "host": self.host,
            "pid": os.getpid(),
            "gpu": self.gpu,
            "queue": self.queue,
            "engine": self.engine.kind,
            "engine_url": self.engine.url,
            "models": json.dumps(self.engine.models),
            "simulated": int(self.engine.simulated),
            "slots": slots.concurrency,
            "busy_i": interactive,
            "busy_b": len(running) - interactive,
            "batch_cap": slots.batch_limit,
            "reserve": slots.reserve,
            "governor": governing.state.value,
            "governor_why": governing.reason,
            "chat_seen": governing.far_over.seen,
            "chat_far_over": governing.far_over.slow,
            "state": self.state,
            "started_at": round(self.started_at * 1000),
            "seen_at": round(time.time() * 1000),
            "claimed_at": round(slots.desk.claimed_at * 1000),
            "lanes": json.dumps(sorted({lease.fence.lane for lease in running})),
            "version": self.version,
            **measuring.snapshot(),
        }

    def ready_line(self, slots: Slots) -> str:
        """Return the line that says that the worker serves, with its operating point."""
        engine = self.engine
        models = ", ".join(engine.models[:3]) + (", ..." if len(engine.models) > 3 else "")
        simulated = " SIMULATED" if engine.simulated else ""
        return (
            f"ready {self.worker_id} queue={self.queue} gpu={self.gpu} engine={engine.kind}{simulated} "
            f"url={engine.url} models={models or '-'} concurrency={slots.concurrency} reserve={slots.reserve}"
        )
