"""One clock for a call and all that it calls."""

from __future__ import annotations

import time


class Deadline:
    """A point in time by which a call must have answered.

    Args:
        seconds: time from now, in seconds; 0 means "answer with what there is".
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._at
