"""The Lua scripts, one typed function each, without logic.

A function takes values and returns a `Call`: which script, with which KEYS and ARGV, and how to read its reply. It
sends nothing; `run` (one trip for any number of calls) does. What a script promises stands in its own header. The
modules are the verbs of a noun each; who calls them sees one namespace: `scripts.claim`, `scripts.run`.
"""

from __future__ import annotations

from llmq.scheduler.scripts.call import NAMES, Call, Caller, Script, run, run_all, run_sync, script, text
from llmq.scheduler.scripts.changing import (
    BatchCancel,
    cancel_batch,
    cancel_job,
    collect,
    delete_batch,
    delete_job,
    pause_batch,
)
from llmq.scheduler.scripts.claiming import (
    MAX_CANDIDATES,
    MOST_TOKENS,
    Claimed,
    Doomed,
    Renewed,
    claim,
    first_delta,
    renew,
    tell,
)
from llmq.scheduler.scripts.fleet import Beat, Lead, beat, configure, forget, hold, lead, let_go
from llmq.scheduler.scripts.settling import Finish, finish, hand_back, retry, settle
from llmq.scheduler.scripts.submitting import SubmitLine, Verdict, open_batch, seal_batch, submit_job, submit_lines
from llmq.scheduler.scripts.sweeping import FAR_AWAY_MS, Swept, lose, reap, recount, sweep

__all__ = [
    "FAR_AWAY_MS",
    "MAX_CANDIDATES",
    "MOST_TOKENS",
    "NAMES",
    "BatchCancel",
    "Beat",
    "Call",
    "Caller",
    "Claimed",
    "Doomed",
    "Finish",
    "Lead",
    "Renewed",
    "Script",
    "SubmitLine",
    "Swept",
    "Verdict",
    "beat",
    "cancel_batch",
    "cancel_job",
    "claim",
    "collect",
    "configure",
    "delete_batch",
    "delete_job",
    "finish",
    "first_delta",
    "forget",
    "hand_back",
    "hold",
    "lead",
    "let_go",
    "lose",
    "open_batch",
    "pause_batch",
    "reap",
    "recount",
    "renew",
    "retry",
    "run",
    "run_all",
    "run_sync",
    "script",
    "seal_batch",
    "settle",
    "submit_job",
    "submit_lines",
    "sweep",
    "tell",
    "text",
]
