"""Every Lua script opens with a header of fixed form, takes all its keys from KEYS, and is called as it says."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from tests.contract.lua_script import Arguments, LuaScript

FOLDER = Path(str(files("llmq.scheduler") / "lua"))
SCRIPTS = [LuaScript.read(path) for path in sorted(FOLDER.glob("*.lua"))]

GOOD = """\
-- renew: keep the leases of jobs that this worker still runs.
--
-- KEYS    1..2 queue  the keys of the queue
--         3 lane      stream: the lane that they were
--                     claimed from
-- ARGV    1 consumer  who renews
--         2.. entry,
--             delivery  one pair a job (the fence)
-- From    running
-- To      running
-- Returns the entries whose lease belongs to another delivery
--
-- Cost: grows with the jobs renewed.

local config, lane, consumer = KEYS[1], KEYS[3],
  ARGV[1]

for i = 2, #ARGV, 2 do
  redis.call('XCLAIM', lane, 'workers', consumer, 0, ARGV[i], 'JUSTID') -- not KEYS[1]
end
return redis.call('XREADGROUP', 'GROUP', 'workers', consumer, 'STREAMS', lane, '>')
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_has_the_form(script: LuaScript) -> None:
    """Header complete, keys and arguments numbered and named, no key made in Lua (F-091)."""
    assert [] == script.faults()


def test_the_header_is_read_as_it_is_meant() -> None:
    """Ranges, single names and repeated groups come out as numbers and names."""
    script = LuaScript("renew", GOOD)
    assert [] == script.faults()
    assert Arguments(("queue1", "queue2", "lane")) == script.keys
    assert Arguments(("consumer",), ("entry", "delivery")) == script.argv
    assert [True, False, True] == [script.argv.takes(count) for count in (1, 2, 3)]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("-- renew:", "-- Renew:", "the first line is not"),
        ("-- To      running\n", "", "expected ['KEYS', 'ARGV', 'From', 'To', 'Returns']"),
        ("-- From    running", "-- From", "From says nothing"),
        ("3 lane", "4 lane", "expected number 3"),
        ("--         2.. entry", "--         2.. other  any\n--         3 entry", "nothing may follow"),
        ("1 consumer  who", "who", "expected number 1"),
        ("1 consumer  who", "1 Consumer: who", "expected `number name  description`"),
        ("'XCLAIM', lane", "'XCLAIM', KEYS[3]", "KEYS[3] stands below the local names"),
        ("'XCLAIM', lane", "'XCLAIM', 'lane:' .. lane", "not passed in KEYS"),
        ("'XCLAIM', lane", "'XCLAIM', 'llmq:{q}:lane'", "builds a key"),
        ("'STREAMS', lane", "'STREAMS', 'lane'", "not passed in KEYS"),
        ("for i", "local job = 'job:' .. consumer\nredis.call('DEL', lane, job)\nfor i", "not passed in KEYS (job)"),
        ("-- renew", "#!lua\n-- renew", "refuse every write at maxmemory"),
    ],
)
def test_a_fault_is_named(old: str, new: str, fault: str) -> None:
    """Each rule of the form finds the script that breaks it."""
    faults = LuaScript("renew", GOOD.replace(old, new)).faults()
    assert any(fault in found for found in faults), faults
