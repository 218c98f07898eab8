"""Reading: when the next batch prompt may be read beside chat.

Engines read prompts and make tokens in the same steps, so a batch prompt slows down every first token that is waited
for meanwhile, as much as a chat prompt of its length does. Four rules bound that, whatever the batch cap allows:

- None is begun while so many prompt tokens or more are unread in the engine: what chat meets that comes after a pause.
- While chat waits for its first token at most one is begun a second: batch must not wait for ever.
- A long one that is being read when chat comes makes way: it has shown no token yet, so only its reading is lost.
- Beside chat no more tokens a second are read than were measured to hold, where `llmq tune` has measured it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: While so many prompt tokens of batch are unread, no prompt is begun: about what engines read in one step. One of no
#: more is read before its abort would reach the engine.
UNREAD = 512

#: While chat waits for its first token, the next batch prompt is begun so long after the last one at the earliest.
YIELD_S = 1.0


@dataclass(slots=True)
class Reading:
    """Remembers when the last batch prompt was begun.

    `tokens_a_second` is what holds beside chat; 0: nobody has measured it, or nothing held: the limit alone is left.
    """

    tokens_a_second: float = 0.0
    begun_at: float = -math.inf
    _next_at: float = -math.inf
    _billed_s: float = 0.0

    def begun(self, now: float, tokens: int, chat: bool) -> None:
        """A batch prompt of so many tokens is being read, beside chat or not: what is read without it costs nobody."""
        self.begun_at = now
        self._billed_s = tokens / self.tokens_a_second if chat and self.tokens_a_second > 0 else 0.0
        if self._billed_s:
            self._next_at = max(now, self._next_at) + self._billed_s

    def interrupted(self, now: float) -> None:
        """The prompt that was begun last made way for chat: it is begun anew, and not at once beside that chat.

        What makes way is long, and behind a long prompt that is unread none is begun: so it is the last one.
        """
        self.begun_at = now
        self._next_at -= self._billed_s
        self._billed_s = 0.0

    def may_begin(self, now: float, unread: int, waiting: int, chat: bool) -> bool:
        """Whether another batch prompt may be begun, with so many tokens unread and chat requests waiting."""
        if unread >= UNREAD or (waiting and now - self.begun_at < YIELD_S):
            return False
        return not chat or now >= self._next_at


def makes_way(prompt: int, shown: int) -> bool:
    """Whether a batch request makes way for chat that comes: its long prompt is being read, it has shown no token."""
    return not shown and prompt > UNREAD
