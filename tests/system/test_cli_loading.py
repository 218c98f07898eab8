"""Ctrl-C while the command line is still being loaded: the first moment at which anybody can press it."""

from __future__ import annotations

import subprocess
import sys

#: A finder that presses Ctrl-C when a module of the commands is looked for, then does what the entry point does.
INTERRUPTED_WHILE_LOADING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "llmq.cli.batch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from llmq.cli.main import main

sys.argv = ["llmq", "status"]
main()
"""


def test_it_is_one_word_and_exit_130() -> None:
    """Loading takes a second on a busy machine; nobody wants to see where Python was (G14)."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_LOADING], capture_output=True, text=True, check=False, timeout=60
    )
    assert (130, "", "interrupted\n") == (done.returncode, done.stdout, done.stderr)


def test_the_entry_point_itself_loads_no_command() -> None:
    """Whatever it would load first, Ctrl-C would meet there."""
    script = "import sys, llmq.cli.main; print([name for name in sys.modules if name.startswith(('typer', 'redis'))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "[]\n" == done.stdout
