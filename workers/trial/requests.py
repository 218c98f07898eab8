"""The requests of a trial: prompts and answers of given lengths, each prompt unlike all others.

An engine remembers the beginnings of prompts: what was measured of a prompt that it has seen before would say nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.job import Job
from llmq.workers.traffic import Arrival
from llmq.workers.trial.metered import BATCH_USER

CHAT_URL = "/v1/chat/completions"

#: Tokens of batch lines, before scaling: from, to.
BATCH_PROMPT, BATCH_ANSWER = (100, 800), (100, 400)

_WORDS = ("the", "sea", "of", "and", "a", "to", "in", "is", "ship", "wave")


@dataclass(frozen=True, slots=True)
class Wording:
    """How long texts are in an engine's tokens: `fixed` of an empty prompt, `per_word` of each word."""

    fixed: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Return how many words make a prompt of so many tokens."""
        return max(1, round((tokens - self.fixed) / self.per_word))


class Requests:
    """Makes requests for one engine; `most_tokens` is what prompt and answer have at most together.

    `batch_prompt` is how many tokens batch prompts have before scaling, from and to.

    Lengths are the same every time, texts never: else a phase would find its prompts in what the engine remembers of
    the one before.
    """

    def __init__(
        self,
        wording: Wording,
        tokens: float,
        most_tokens: int,
        seed: int = 1,
        *,
        batch_prompt: tuple[int, int] = BATCH_PROMPT,
    ) -> None:
        self._wording = wording
        self._tokens = tokens
        self._most = most_tokens
        self._batch_prompt = batch_prompt
        self._luck = random.Random(seed)
        self._texts = random.Random()

    def chat(self, arrival: Arrival) -> dict[str, Any]:
        """Return the body of a chat request."""
        return self._body(arrival.prompt, arrival.answer)

    def batch(self) -> dict[str, Any]:
        """Return the body of the next batch line."""
        prompt, answer = (self._scaled(self._luck.randint(*span)) for span in (self._batch_prompt, BATCH_ANSWER))
        return self._body(prompt, answer) | {"user": BATCH_USER}

    def reading(self, prompt: int) -> dict[str, Any]:
        """Return the body of a batch line that is nearly all prompt."""
        return self._body(prompt, 1) | {"user": BATCH_USER}

    def lines(self, count: int) -> Iterator[Job]:
        """Yield batch lines."""
        for _ in range(count):
            yield Job(CHAT_URL, self.batch())

    def _body(self, prompt: int, answer: int) -> dict[str, Any]:
        answer = max(1, min(answer, self._most // 2))
        prompt = max(1, min(prompt, self._most - answer))
        count = self._wording.words(prompt)
        text = " ".join((f"{self._texts.getrandbits(20):x}", *self._texts.choices(_WORDS, k=max(0, count - 1))))
        # `ignore_eos` is vLLM's, SGLang's and llama.cpp's; others end where they like.
        return {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": answer,
            "temperature": 0.7,
            "ignore_eos": True,
        }

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self._tokens))
