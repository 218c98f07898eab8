"""The entry point: runs what was typed, and ends the process with the exit code that the outcome means (`errors.py`).

The commands (`commands.py`) are loaded within it, because loading takes the better part of a second: whoever presses
Ctrl-C by then is told so, and not where Python was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: As in `errors.py`, which is not loaded yet when it is needed.
_INTERRUPTED = 130


def run_line(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command line and return its exit code."""
    import typer

    from llmq.cli.commands import app
    from llmq.cli.errors import guard

    def command() -> None:
        # Without its standalone mode the parser returns the code of an Exit that was raised, and a verb's own value.
        code = app(list(arguments), prog_name="llmq", standalone_mode=False)
        if isinstance(code, int) and code:
            raise typer.Exit(code)

    return guard(command, debug=debug)


def main() -> None:
    """Run what was typed; the entry point of `llmq`."""
    try:
        from llmq.cli.errors import DEBUG

        # Taken out of the environment: it is no setting, and a variable that no setting goes by is refused.
        debug = os.environ.pop(DEBUG, "") not in ("", "0")
        code = run_line(sys.argv[1:], debug=debug)
    except KeyboardInterrupt:
        # While the commands were loaded; what a command raises does not get here.
        sys.stderr.write("interrupted\n")
        code = _INTERRUPTED
    sys.exit(code)
