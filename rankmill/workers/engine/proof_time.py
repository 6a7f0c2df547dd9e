"""Estimates how long it takes to check a model's scores, from the time that the finished batches took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rankmill.jobs.system import system

_OVERHEAD = 32
"""Each forward counts as this many tokens more than it has, because starting it takes time too."""

_ENOUGH = 0.1
"""The time that a check of a model's scores still needs is estimated once this share of its work is done."""

_STEP, _LONG, _MINUTE = 5, 120, 60
"""An estimate is rounded up to a multiple of `_STEP` seconds, or to whole minutes above `_LONG` seconds."""

T = TypeVar("T")


class ProofTime:
    """An estimate of how long the proof of a model's scores (a comparison with transformers') takes.

    ``str()`` returns the estimate as the end of a sentence, such as ``: about 20 s``. While nothing is known,
    the text is empty. Any thread may call ``str()``.

    Parameters
    ----------
    on_change
        Called when progress changes the text of the estimate.
    """

    def __init__(self, on_change: Callable[[ProofTime], None] = lambda _: None) -> None:
        self._on_change, self._began = on_change, system.monotonic()
        self._expected: tuple[float, bool] | None = None

    def each(self, items: Sequence[T], costs: Sequence[float], then: float | None = None) -> Iterator[T]:
        """Yield items of work, and estimate the proof's duration from the time that the caller takes for
        them.

        Parameters
        ----------
        items
            The parts of the work; each is scored in one forward.
        costs
            The tokens of each item.
        then
            Seconds that the proof takes after the last item; ``None`` if this time is not known yet.
        """
        costs = [cost + _OVERHEAD for cost in costs]
        began, done, whole = system.monotonic(), 0.0, sum(costs)
        for item, cost in zip(items, costs, strict=True):
            yield item
            done += cost
            if done >= _ENOUGH * whole:
                before, now = str(self), system.monotonic()
                seconds_left = (now - began) * (whole - done) / done
                self._expected = now - self._began + seconds_left + (then or 0), then is not None
                if str(self) != before:
                    self._on_change(self)

    def __str__(self) -> str:
        if not self._expected:
            return ""
        (seconds, is_all), spent = self._expected, system.monotonic() - self._began
        if not is_all:
            return f": at least {_in_words(max(seconds, spent))}"
        if spent > _rounded(seconds):
            return f": longer than the {_in_words(seconds)} expected, {spent:,.0f} s so far"
        return f": about {_in_words(seconds)}"


def _rounded(seconds: float) -> int:
    step = _STEP if seconds <= _LONG else _MINUTE
    return max(math.ceil(seconds / step), 1) * step


def _in_words(seconds: float) -> str:
    whole = _rounded(seconds)
    return f"{whole} s" if whole <= _LONG else f"{whole // _MINUTE} min"
