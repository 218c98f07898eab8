"""The open files of this process: each connection is one, and the usual limit of 1,024 is a shell's, not a server's.

What a system allows beyond it, a process may take for itself. A server that runs into its limit does not refuse a
connection, it drops it, and can neither reach Redis again nor write a file.
"""

from __future__ import annotations

import contextlib

#: More than any process of llmq opens.
WANTED = 65_536


def allow_open_files(wanted: int = WANTED) -> int | None:
    """Let this process open so many files, or as many as it may; return how many that are, None where nobody says."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit behind this one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
