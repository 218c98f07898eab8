"""Samples: which lines are taken, and what they say of the whole file."""

from __future__ import annotations

import io
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.lines import check, open_input
from llmq.scheduler.sampling import SampledLine, choose, estimate, sample_lines, total_of


class TestChoosing:
    """Lines from everywhere, the same ones each time."""

    @given(st.integers(1, 5000), st.integers(1, 300), st.text())
    def test_one_line_is_taken_from_each_stretch(self, good: int, count: int, seed: str) -> None:
        """Ascending, none twice, and as many as there are at most."""
        chosen = choose(good, count, seed)
        assert min(good, count) == len(set(chosen))
        assert sorted(chosen) == chosen
        assert chosen == choose(good, count, seed)
        for place, line in enumerate(chosen):
            assert good * place // len(chosen) <= line < good * (place + 1) // len(chosen)

    def test_bad_lines_are_not_taken(self) -> None:
        """A sample of all good lines is these, with their own numbers."""
        content = b'"a"\n{}\n\n"b"\nnothing\n"c"\n'
        with open_input("-", stdin=io.BytesIO(content)) as file:
            checked = check(file, skip_bad=True)
            assert [1, 4, 6] == [line.number for line in sample_lines(file, checked, 100)]
            (one,) = sample_lines(file, checked, 1)
            assert one.number in (1, 4, 6)


class TestEstimates:
    """An estimate with a range that holds what it should."""

    def test_the_range_holds_the_truth_in_95_of_100_cases(self) -> None:
        """Lengths as they are: many short, some long. 300 files, samples of 50 of 2,000 lines."""
        draw, held = random.Random(7), 0
        for case in range(300):
            lengths = [int(draw.expovariate(1 / 200)) + 1 for _ in range(2000)]
            found = total_of([lengths[place] for place in choose(2000, 50, str(case))], 2000)
            assert found.low is not None
            assert found.high is not None
            held += found.low <= sum(lengths) <= found.high
        assert 270 <= held <= 297

    def test_a_whole_file_is_known_and_one_line_says_nothing_of_the_range(self) -> None:
        """No range where there is none."""
        assert {"estimate": 6, "low": 6, "high": 6} == total_of([1, 2, 3], 3).to_json()
        assert {"estimate": 300, "low": None, "high": None} == total_of([3], 100).to_json()

    def test_no_range_is_below_what_was_seen(self) -> None:
        """Tokens that were counted are spent."""
        found = total_of([0, 0, 1000], 5)
        assert found.low == 1000

    def test_time_goes_by_the_rate_and_failures_by_their_reason(self) -> None:
        """The most frequent first."""
        lines = [SampledLine(10, 5)] * 6 + [SampledLine(reason="HTTP 400: too long")] * 3 + [SampledLine(reason="x")]
        found = estimate(lines, 1000, seconds=5.0)
        assert (2.0, 500.0) == (found.lines_per_second, found.seconds.estimate)
        assert (("HTTP 400: too long", 3), ("x", 1)) == found.reasons
        assert (6, 4) == (found.to_json()["completed"], found.failed)
        assert found.seconds.low is not None
        assert found.seconds.high is not None
        assert 5 <= found.seconds.low < 500 < found.seconds.high
        json.dumps(found.to_json())

    @pytest.mark.parametrize("count", [1, 2, 3, 30])
    def test_lines_without_tokens_have_an_estimate_too(self, count: int) -> None:
        """Embeddings of an engine that counts nothing."""
        found = estimate([SampledLine()] * count, 1000, seconds=1.0)
        assert (0, 1000 / count) == (found.prompt_tokens.estimate, found.seconds.estimate)
