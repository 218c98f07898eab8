"""Chaos: llmq under every fault at once, and an audit that holds the laws against what came of it.

    python -m tests.chaos --seed 7 --seconds 600

`plan.py` makes a timetable of faults from a seed; `cast.py` has the processes, `faults.py` what is done to them, and
`producers.py` those who want answers. All parties write into one `journal.py`; the server writes its own, the
append-only file, which `history.py` reads and `replay.py` turns into a `ledger.py`. `audit.py` judges, `story.py`
tells. `planted.py` turns guards of llmq off, and `soak.py` runs very many jobs.
"""
