"""The line set: which lines an output has, at one bit a line."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.line_set import LineSet
from llmq.scheduler.records import ResultRecord, render


class TestLineSet:
    """It behaves as a set of numbers does."""

    @given(st.lists(st.integers(0, 5000)))
    def test_a_line_is_new_once(self, numbers: list[int]) -> None:
        """In any order, with any gaps."""
        lines, model = LineSet(), set[int]()
        for number in numbers:
            assert (number not in model) == lines.add(number)
            model.add(number)
            assert len(model) == len(lines)

    def test_ten_million_lines_take_a_few_megabytes(self) -> None:
        """Constant for any file that people submit."""
        tracemalloc.start()
        lines = LineSet()
        for number in range(1, 10_000_000, 1000):
            lines.add(number)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20

    def test_lines_are_read_back_from_an_output_file(self) -> None:
        """As `render` writes them; other lines are passed over."""
        results = [ResultRecord(number, f"row_{number}", "completed", 200, "", b"{}") for number in (7, 12, 9)]
        own = [render(result, "batch_1") for result in results[:2]]
        other = render(results[2], "batch_12")
        lines = LineSet()
        lines.add_from([line + b"\n" for line in (*own, other, b"nothing of ours")], "batch_1")
        assert 2 == len(lines)
        assert [False, False, True] == [lines.add(number) for number in (7, 12, 9)]
