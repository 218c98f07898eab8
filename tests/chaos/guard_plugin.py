"""A plugin of pytest that turns off the guard that `CHAOS_GUARD_OFF` names; only `planted.py` asks for it."""

from __future__ import annotations

import os

import pytest

from tests.chaos import guards


def pytest_configure(config: pytest.Config) -> None:
    """Turn it off before any test is read."""
    guards.turn_off(os.environ.get("CHAOS_GUARD_OFF", ""))
