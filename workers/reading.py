"""Reading: when the next batch prompt may be read beside chat.

Engines read prompts and make tokens in the same steps, so a batch prompt slows down every first token that is waited
for meanwhile, as much as a chat prompt of its length does. Four rules bound that, whatever the batch cap allows:

- So many prompt tokens at most are unread in the engine, one prompt at least: what chat meets that comes after a pause.
- None is begun while chat waits for its first token, for a second at most: batch must not wait for ever.
- A long one that is being read when chat comes makes way: it has shown no token yet, so only its reading is lost.
- Beside chat no more tokens a second are read than were measured to hold, where `llmq tune` has measured it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Prompt tokens of batch that may be unread at once: what engines read in one step. A prompt of no more is read before
#: its abort would reach the engine.
UNREAD = 512

#: A batch start waits for chat that waits for its first token, but never longer than this.
YIELD_S = 1.0


@dataclass(slots=True)
class Reading:
    """Remembers when the last batch prompt was begun. `tokens_a_second` is what holds beside chat; 0: not known."""

    tokens_a_second: float = 0.0
    begun_at: float = -math.inf
    _next_at: float = -math.inf

    def begun(self, now: float, tokens: int) -> None:
        """A batch prompt of so many tokens is being read."""
        self.begun_at = now
        if self.tokens_a_second > 0:
            self._next_at = max(now, self._next_at) + tokens / self.tokens_a_second

    def interrupted(self, now: float, tokens: int) -> None:
        """A prompt of so many tokens made way for chat: it is begun anew, and not while that chat waits."""
        self.begun_at = now
        if self.tokens_a_second > 0:
            self._next_at = max(now, self._next_at - tokens / self.tokens_a_second)

    def may_begin(self, now: float, unread: int, waiting: int, chat: bool) -> bool:
        """Whether another batch prompt may be begun, with so many tokens unread and chat requests waiting."""
        if unread >= UNREAD or (waiting and now - self.begun_at < YIELD_S):
            return False
        return not chat or now >= self._next_at


def makes_way(prompt: int, shown: int) -> bool:
    """Whether a batch request makes way for chat that comes: its long prompt is being read, it has shown no token."""
    return not shown and prompt > UNREAD
