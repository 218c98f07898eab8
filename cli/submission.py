"""What `llmq submit-batch` was asked for, and the commands that go on with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmq.cli.render import command
from llmq.cli.session import where_options
from llmq.scheduler.lines import InputFile
from llmq.scheduler.output import PartLimit, ResultFile, ResultStream, open_output
from llmq.scheduler.settings import Loaded


@dataclass(frozen=True, slots=True)
class Submission:
    """What was asked for."""

    file: str
    loaded: Loaded
    model: str | None
    window: float | None
    name: str
    resume: str | None
    wait: bool
    out: Path | None
    part_size: str | None
    ordered: bool
    force: bool
    no_wait: bool
    skip_bad: bool
    sample: int | None
    json: bool

    def open_output(self, batch_id: str, file: InputFile) -> ResultFile | ResultStream:
        """Open where the results of a batch go."""
        return open_output(
            self.out,
            batch_id,
            ordered=self.ordered,
            force=self.force,
            input_file=file,
            parts=PartLimit.parse(self.part_size),
        )

    def again(self, batch_id: str) -> str:
        """Return the command that goes on with the submission of a batch."""
        words: list[object] = ["llmq", "submit-batch", self.file, "--resume", batch_id, *where_options(self.loaded)]
        words += ["--model", self.model] if self.model else []
        words += ["--skip-bad"] if self.skip_bad else []
        if self.loaded.source("max_line_bytes") == "argument":
            words += ["--max-line-bytes", self.loaded.settings.max_line_bytes]
        words += ["-o", self.out] if self.out else ["--wait"] if self.wait else []
        words += ["--part-size", self.part_size] if self.part_size else []
        return command(*words, *(["--ordered"] if self.ordered else []))

    def collect_later(self, batch_id: str) -> str:
        """Return the command that goes on collecting the results of a batch."""
        words: list[object] = ["llmq", "batch", "results", batch_id, *where_options(self.loaded)]
        words += ["-o", self.out] if self.out else []
        words += ["--part-size", self.part_size] if self.part_size else []
        return command(*words, *(["--ordered"] if self.ordered else []), "--follow")
