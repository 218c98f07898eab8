"""What `llmq run` was asked for, and what an earlier run of the same file has to do with it.

The same file is the same batch, in a queue named after the file's digest. What answered it before may not be passed off
as what is asked for now: another model or engine starts over, by `--force` and with the next id.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmq.cli.engine import EngineStart
from llmq.cli.render import command, notice
from llmq.cli.session import redis_option
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import UsageError
from llmq.scheduler.lines import InputFile
from llmq.scheduler.output import Output, PartLimit, open_output
from llmq.scheduler.redis_url import redact
from llmq.scheduler.settings import Loaded


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for."""

    file: str
    loaded: Loaded
    out: Path | None
    part_size: str | None
    model: str
    ordered: bool
    force: bool
    skip_bad: bool
    sample: int | None
    json: bool
    start: EngineStart

    @property
    def engine(self) -> str:
        """The engine as it was named, "" where it is looked for; how many slots a local model has is no other one."""
        named = self.loaded.settings.engine or ""
        return named.partition("?")[0] if named.startswith("local:") else named.rstrip("/").removesuffix("/v1")

    def source(self, file: InputFile) -> str:
        """Return what an output is made of: the file, the model in the place of its own, and how much of it."""
        model = f" model={self.model}" if self.model else ""
        return file.digest + model + (f" sample={self.sample}" if self.sample else "")

    def open_output(self, batch_id: str, file: InputFile) -> Output:
        """Open where the results of a batch go."""
        return open_output(
            self.out,
            batch_id,
            source=self.source(file),
            ordered=self.ordered,
            force=self.force,
            input_file=file,
            parts=PartLimit.parse(self.part_size),
        )

    def again(self) -> str:
        """Return the command that goes on from where this one stops."""
        settings, words = self.loaded.settings, ["llmq", "run", self.file]
        words += ["-o", str(self.out)] if self.out else []
        words += ["--part-size", self.part_size] if self.part_size else []
        for name in ("engine", "concurrency", "max_line_bytes"):
            if self.loaded.source(name) == "argument":
                words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
        words += ["--serve", self.start.serve] if self.start.serve else []
        words += ["--serve-log", self.start.log] if self.start.log else []
        words += ["--gpu", self.start.gpu] if self.start.gpu != "0" else []
        words += ["--model", self.model] if self.model else []
        words += ["--sample", str(self.sample)] if self.sample else []
        words += [*(["--ordered"] if self.ordered else []), *(["--skip-bad"] if self.skip_bad else [])]
        return command(*words, *redis_option(self.loaded))


async def find_earlier(batches: Batches, digest: str) -> BatchRecord | None:
    """Return the newest batch of this file."""
    return next((record for record in await batches.ls() if record.digest == digest), None)


def id_of_batch(queue: str, earlier: BatchRecord | None, *, anew: bool) -> str:
    """Return the batch's id: the same for the same file, and the next one (`-2`, `-3`, ...) to start over."""
    if earlier is None:
        return queue
    if not anew:
        return earlier.id
    count = earlier.id.removeprefix(queue).removeprefix("-")
    return f"{queue}-{int(count or 1) + 1}"


async def discard(batches: Batches, record: BatchRecord) -> None:
    """Take an earlier run out of the way: no line of it may start any more."""
    if not record.ended:
        record = await batches.cancel(record.id)
    if record.ended:
        await batches.delete(record.id)


def refuse_other(asked: Run, earlier: BatchRecord) -> None:
    """Refuse to pass off what another model or engine answered as the answers that are asked for now."""
    before = earlier.extra or {}
    model, engine = before.get("model", ""), before.get("engine", "")
    if model != asked.model:
        was = f"with --model {model}" if model else "without --model"
        raise UsageError(f"an earlier run of this file was {was}; give the same, or start over: --force")
    if engine and asked.engine and engine != asked.engine:
        if earlier.ended:
            raise UsageError(f"this file was run on {redact(engine)} before; run it on another engine: --force")
        notice(f"note: lines that are done were answered by {redact(engine)}; going on with {redact(asked.engine)}")
