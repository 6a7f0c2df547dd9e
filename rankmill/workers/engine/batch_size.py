"""Decides the size of a batch by its padded tokens, its rows, and the memory that is free now.

The first budget of padded tokens is the setting ``token_budget``. With ``auto``, it is the device's entry in
`TOKEN_BUDGETS`.

With ``auto`` the size adapts, unless ``max_batch`` is set or the model is deterministic. A batch of a slow
model has fewer tokens than the budget, so that it takes about half a second. A search of a few seconds finds
a better budget, which is cached on disk.

A batch that is not expected to fit into memory (`rankmill.workers.engine.headroom`) is cut. If a batch does
not fit all the same, the budget becomes at most half of that batch's tokens.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rankmill.jobs.cache import cache_folder, read_json
from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.jobs.system import system
from rankmill.workers.backends.base import Backend, DeviceLost
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.headroom import Headroom, memory_of
from rankmill.workers.engine.work import reason_of
from rankmill.workers.host.device import device_name, empty_cache, threads
from rankmill.workers.host.disk_cache import digest, try_to_keep
from rankmill.workers.models.loading import Model

_MIXED_SECONDS = 4.25
"""Chunks are cut into batches together only if scoring all of them takes at most this many seconds. Further
chunks wait, so that the first chunks end soon: if the worker dies, the scored rows of unfinished chunks are
lost.
"""

_LEAST_TOKENS = 512
"""The batches of a slow model are made shorter, but not below this number of tokens. Fewer tokens would cost
speed (7% with 384 tokens, PyTorch on a CPU).
"""

_FIRST_SHARE = 4
"""A model's first batches have at most 1/4 of the token budget, because the model may be slow."""

_FEWEST = 4
"""Several chunks are cut into batches together only if they make at most this many batches in all. The limit
is higher for a fast model, except if its rows are packed (not padded).
"""

_LATEST = 20
"""A model's speed, in tokens per second, is the median over its latest batches, at most this many."""

_BATCH_SECONDS = 0.5
"""A batch should take at most this many seconds, because requests wait for it. Smaller batches also have less
padding.
"""

_WORTH = 50
"""The search for a better token budget begins when all forwards so far took this many times as long as the
search will take. A short run therefore does not wait for a search.
"""

_FACTORS = (0.5, 1, 2, 4)
"""The search tries these multiples of the first token budget. On a GPU it then keeps doubling the largest
budget, until that is no longer faster or a batch would take more than `_BATCH_SECONDS`.
"""

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_LIMIT_SECONDS = 5
"""The search for a token budget runs one batch of every budget in each round. It ends at the first of these:

- The speeds are steady, after `_LEAST_ROUNDS` or more rounds.
- `_LIMIT_SECONDS` are over, after two or more rounds.
- `_MOST_ROUNDS` rounds are done.
"""

_AS_GOOD = 0.97
"""A token budget counts as equally fast as the fastest one if its speed is at least this share of the fastest
speed. If speeds are noisy, a smaller share is enough.
"""

_STEADY = 0.03
"""If a budget's fastest and second-fastest round differ by more than this share, the machine counts as busy.
"""

_RECIPE = 3
"""Version of the search for a token budget; it changes when the same machine would find another budget."""

logger = logging.getLogger(__name__)


class BatchSize:
    """The size of the batches of one model on one device.

    Parameters
    ----------
    token_budget
        A batch has at most this many padded tokens. The methods `search` and `shrink` change this number.
    max_rows
        A batch has at most this many rows.
    search
        Finds a better token budget.
    headroom
        Tells which batches fit into memory; by default all do.
    short_batches
        Whether batches of a slow model have fewer tokens than the budget, so that they take about
        `_BATCH_SECONDS`.

    >>> size = BatchSize(2048, short_batches=True)
    >>> size.tokens(), size.mixed_batches(512)
    (512, 4)
    >>> size.see(512, rows=8, tokens=500, seconds=0.25)
    False
    >>> size.tokens(), size.mixed_batches(1024)
    (1024, 8)
    """

    def __init__(
        self,
        token_budget: int,
        *,
        max_rows: int | None = None,
        search: BudgetSearch | None = None,
        headroom: Headroom | None = None,
        short_batches: bool = False,
    ) -> None:
        self.token_budget = token_budget
        self.max_rows = max_rows
        self._search = search
        self.headroom = headroom or Headroom()
        self._short_batches = short_batches
        self._speeds: deque[float] = deque(maxlen=_LATEST)

    @classmethod
    def of(cls, settings: WorkerSettings, model: Model) -> BatchSize:
        """Make the `BatchSize` of a model from a worker's settings.

        The token budget adapts only if the settings leave the budget and the number of rows open, and the
        model is not deterministic.
        """
        backend, search = model.backend, None
        token_budget = first_budget(settings.token_budget, backend.device)
        max_rows = settings.max_batch if isinstance(settings.max_batch, int) else None
        if is_auto := not isinstance(settings.token_budget, int) and max_rows is None and not model.kind:
            search = BudgetSearch(backend, model.name, token_budget, cache_folder(settings.cache_dir))
            token_budget = search.start
        return cls(
            token_budget,
            max_rows=max_rows,
            search=search,
            headroom=Headroom(memory_of(backend.device)),
            short_batches=is_auto,
        )

    def tokens(self, *, share_prefixes: bool = False) -> int:
        """Return how many padded tokens each of the next batches may have.

        Rows that share prefixes get the whole budget, because they gain from large batches.
        """
        if share_prefixes or not self._short_batches:
            return self.token_budget
        if not self._speeds:
            return max(self.token_budget // _FIRST_SHARE, 1)
        return min(self.token_budget, max(round(_BATCH_SECONDS * median(self._speeds)), _LEAST_TOKENS))

    def mixed_batches(self, tokens: int, *, packed: bool = False) -> int:
        """Return how many batches of `tokens` tokens several chunks may make in all, if the chunks are cut
        into batches together.

        The limit is `_FEWEST` if the rows are `packed` (not padded), or if the model's speed is not known
        yet.
        """
        if packed or not self._speeds:
            return _FEWEST
        return max(round(_MIXED_SECONDS * median(self._speeds) / tokens), _FEWEST)

    def see(self, planned: int, rows: int, tokens: int, seconds: float) -> bool:
        """Record how long a batch took, and return whether to call `search` now.

        There is no search while the model is so slow that its batches have fewer tokens than the smallest
        budget that the search would try.

        Parameters
        ----------
        planned, tokens
            The batch's tokens with padding, and without.
        rows
            The batch's rows.
        seconds
            How long the batch took.
        """
        self._speeds.append(planned / max(seconds, 1e-6))
        due = self._search is not None and self._search.see(rows, tokens, seconds)
        return due and self.tokens() >= min(_FACTORS) * self.token_budget

    def search(self, batch: Batch) -> None:
        """Try batches of several sizes with rows like those of `batch`, and set the token budget to the best
        size.

        Does nothing if the budget is fixed, was already found or was lowered by `shrink`. The search takes
        seconds. The caller must have no other forward in progress.

        Raises
        ------
        DeviceLost
            The device failed.
        """
        if self._search is not None:
            self.token_budget = self._search.find(batch, self.headroom.most_rows)
            self._search = None

    def shrink(self, tokens: int) -> None:
        """Lower the token budget after a batch of `tokens` tokens did not fit into memory. This ends the
        search.
        """
        self.token_budget = max(1, min(self.token_budget, tokens // 2))
        self._search = None


def first_budget(setting: int | str, device: str) -> int:
    """Return the token budget with which a worker begins; ``auto`` means the device's entry in
    `TOKEN_BUDGETS`.
    """
    return setting if isinstance(setting, int) else TOKEN_BUDGETS[device]


class BudgetSearch:
    """The search for the best token budget of one model on one device.

    For each budget, the fastest of several rounds counts. The first budget is kept unless another one is
    clearly faster.

    Parameters
    ----------
    backend
        The loaded model.
    model
        The model's name.
    first
        The budget until a better one is known.
    folder
        The cache folder, which keeps the budget that was found for each model, precision, backend, device and
        number of threads.
    worth
        The search begins when all forwards so far have taken this many times as long as the search is
        expected to take.
    """

    def __init__(self, backend: Backend, model: str, first: int, folder: Path, worth: float = _WORTH) -> None:
        self._backend, self._model, self._first, self._worth = backend, model, first, worth
        self._about: dict[str, Any] = {
            "recipe": _RECIPE,
            "model": model,
            "backend": backend.name,
            "precision": backend.precision,
            "packs": backend.packs,
            "device": device_name(backend.device),
            "threads": threads(),
        }
        self._file = folder / "token-budgets" / f"{digest(self._about)}.json"
        self._seconds = 0.0
        self._rows = self._tokens = 0
        kept_budget = self._read()
        self._done = kept_budget is not None
        self.start = kept_budget or first

    def see(self, rows: int, tokens: int, seconds: float) -> bool:
        """Record how many `seconds` a batch took. Returns whether to call `find` now."""
        if self._done:
            return False
        self._seconds += seconds
        self._rows += rows
        self._tokens += tokens
        return self._seconds >= self._worth * self._expected_seconds()

    def _expected_seconds(self) -> float:
        """Estimate the least number of seconds that `find` takes, by the speed of the batches so far."""
        tokens = (_LEAST_ROUNDS + 1) * self._backend.depth * sum(self._budgets())
        return tokens * self._seconds / max(self._tokens, 1)

    def find(self, batch: Batch, most_rows: Callable[[int], int] = lambda length: sys.maxsize) -> int:
        """Try batches of several token budgets, and return the best budget.

        The budget is cached unless the machine is busy. The device must have no other forward in progress.

        Parameters
        ----------
        batch
            The batches that are tried have rows like those of this batch.
        most_rows
            Returns how many rows of a length fit into memory. Larger batches are not tried.

        Raises
        ------
        DeviceLost
            The device failed.
        """
        self._done = True
        kept_budget = self._read()  # another worker may have found a budget meanwhile
        if kept_budget is not None:
            return kept_budget
        started = system.monotonic()
        speeds = self._try(self._budgets(), batch, most_rows)
        while self._backend.device != "cpu" and (larger := self._larger(speeds)):
            tried = self._try([larger], batch, most_rows)
            if not tried:
                break  # batches of this size do not fit into memory
            speeds |= tried
        if not speeds:
            return self._first
        best, noise = _choose(speeds, self._first)
        seconds = system.monotonic() - started
        figures = {budget: max(rounds) for budget, rounds in speeds.items()}
        if noise <= _STEADY:
            kept = {**self._about, "token_budget": best, "tokens_per_second": figures}
            try_to_keep(self._file, kept, "the token budget")
        logger.info(
            "token budget of %s: %d, found in %.1f s (tokens/s: %s)%s", self._model, best, seconds,
            ", ".join(f"{budget}: {speed:,.0f}" for budget, speed in figures.items()),
            "" if noise <= _STEADY else f"; not kept, as the machine is busy: {noise:.0%} of noise",
        )  # fmt: skip
        return best

    def _budgets(self) -> list[int]:
        wanted = [int(self._first * factor) for factor in _FACTORS]
        return [budget for budget in wanted if budget <= max(self._first, self._most)]

    @property
    def _most(self) -> float:
        """The number of tokens of a batch that takes `_BATCH_SECONDS` at the speed so far."""
        return _BATCH_SECONDS * self._tokens / max(self._seconds, 1e-9)

    def _larger(self, speeds: dict[int, list[float]]) -> int | None:
        """Return twice the largest budget so far, to try it next.

        Returns ``None`` if the largest was not clearly the fastest, or if the next would take too long.
        """
        best = {budget: max(rounds) for budget, rounds in sorted(speeds.items())}
        *smaller, largest = best or [0]
        faster = bool(smaller) and best[largest] * _AS_GOOD > max(best[budget] for budget in smaller)
        return 2 * largest if faster and 2 * largest <= self._most else None

    def _try(
        self, budgets: list[int], batch: Batch, most_rows: Callable[[int], int]
    ) -> dict[int, list[float]]:
        """Run batches of each budget in several rounds, and return the tokens per second of each round.

        Budgets that do not fit into the device's memory, or whose batches fail, are left out.
        """
        length = max(self._tokens // max(self._rows, 1), 1)
        together = most_rows(length) // self._backend.depth
        budgets = [budget for budget in budgets if budget // length <= max(together, 1)]
        speeds: dict[int, list[float]] = {budget: [] for budget in budgets}
        deadline = system.monotonic() + _LIMIT_SECONDS
        for number in range(_MOST_ROUNDS + 1):  # round 0 does not count, because new shapes are slow at first
            for budget in list(speeds):
                try:
                    speed = self._speed(_like(batch, max(budget // length, 1), length))
                except DeviceLost:
                    raise
                except Exception as error:  # mostly `OutOfMemory`, but a row may break the model
                    logger.info("a token budget of %d is left out: %s", budget, reason_of(error))
                    empty_cache(self._backend.device)
                    del speeds[budget]
                    continue
                if number:
                    speeds[budget].append(speed)
            steady = all(_noise(rounds) <= _STEADY for rounds in speeds.values())
            if (number >= _LEAST_ROUNDS and steady) or (number > 1 and system.monotonic() > deadline):
                break
        return speeds

    def _speed(self, batch: Batch) -> float:
        started = time.perf_counter()
        pending = [self._backend.submit(batch) for _ in range(self._backend.depth)]
        for forward in pending:
            forward.result()
        return len(pending) * math.prod(batch.shape) / (time.perf_counter() - started)

    def _read(self) -> int | None:
        try:
            return int(read_json(self._file)["token_budget"])
        except (KeyError, ValueError, TypeError):
            return None


def _choose(speeds: dict[int, list[float]], first: int) -> tuple[int, float]:
    """Choose a token budget by the speeds of each budget's rounds. Also return the largest `_noise` of any
    budget.

    If `first` is about as fast as the best, it is chosen. Otherwise the smallest of the budgets that are
    about as fast as the best is chosen, because small batches have less padding.
    """
    best = {budget: max(rounds) for budget, rounds in speeds.items()}
    noise = max(_noise(rounds) for rounds in speeds.values())
    equal = min(_AS_GOOD, 1 / (1 + noise)) * max(best.values())
    if best.get(first, 0.0) >= equal:
        return first, noise
    return min(budget for budget, speed in best.items() if speed >= equal), noise


def _noise(speeds: list[float]) -> float:
    """Return by which share the fastest speed exceeds the second fastest: speeds of 100 and 103 give 0.03.

    If there is no second speed, the result is infinite.
    """
    slower, faster = sorted([0.0, 0.0, *speeds])[-2:]
    return faster / slower - 1 if slower else float("inf")


def _like(batch: Batch, rows: int, length: int) -> Batch:
    shape = (rows, length)
    types = None if batch.types is None else np.resize(batch.types[0], shape)
    return Batch.padded(np.resize(batch.ids[0], shape), types, np.ones(shape, dtype=np.int64))
