"""The size of a batch: its padded tokens, its rows, and what fits into the memory that is free now.

The first size is the setting ``token_budget``; ``auto`` means the device's entry in `TOKEN_BUDGETS`, which is
in `jobs` because code without torch reads it too. If the model is slow, a batch has fewer tokens, so that it
takes half a second. A search (`rankmill.workers.engine.budget_search`) finds a better budget. If the device
runs out of memory, the budget is halved. A batch that would not fit now (`rankmill.workers.engine.headroom`)
is cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median

from rankmill.jobs.cache import cache_folder
from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.backends.base import Backend, Pending
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.budget_search import BATCH_SECONDS, BudgetSearch
from rankmill.workers.engine.headroom import Headroom, memory_of
from rankmill.workers.models.loading import Model

_MIXED_SECONDS = 4.25
"""Chunks whose rows together take at most this long share batches. The oldest are finished first, so that if
all processes die at once, scored rows of unfinished chunks, less than 5 s of work, are lost.
"""

_LEAST_TOKENS = 512
"""Fewest tokens in a batch of a slow model; fewer would cost speed (7% with 384 tokens, PyTorch on a CPU)."""

_FIRST_SHARE = 4
"""The first batches have 1/4 of the budget's tokens, because the model may be slow."""

_FEWEST = 4
"""Fewest batches that are cut together, because rows in fewer batches are padded too much; also their number
until the time of a batch is known.
"""

_LATEST = 20
"""Number of latest batches whose times count."""


class BatchSize:
    """The size of the batches of one model on one device.

    Parameters
    ----------
    token_budget
        Most padded tokens in a batch. It is halved for good when the device runs out of memory.
    max_rows
        Most rows in a batch.
    search
        Finds a better token budget.
    headroom
        Knows which batches fit into memory.
    short_batches
        Whether a batch of a slow model has fewer tokens than the budget.

    >>> size = BatchSize(2048, short_batches=True)
    >>> size.tokens(), size.mixed_batches(512)
    (512, 4)
    >>> size.see(512, seconds=0.25)
    True
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
        self._headroom = headroom or Headroom()
        self._short_batches = short_batches
        self._speeds: deque[float] = deque(maxlen=_LATEST)

    @classmethod
    def of(cls, settings: WorkerSettings, model: Model) -> BatchSize:
        """Make the size of batches by a worker's settings.

        It is searched unless the settings fix it, or rows are computed one by one.
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
        """Most padded tokens in a batch; rows that share prefixes gain from large batches."""
        if share_prefixes or not self._short_batches:
            return self.token_budget
        if not self._speeds:
            return max(self.token_budget // _FIRST_SHARE, 1)
        return min(self.token_budget, max(round(BATCH_SECONDS * median(self._speeds)), _LEAST_TOKENS))

    def mixed_batches(self, tokens: int) -> int:
        """The number of batches with this many padded tokens that are cut together."""
        if not self._speeds:
            return _FEWEST
        return max(round(_MIXED_SECONDS * median(self._speeds) / tokens), _FEWEST)

    def see(self, planned: int, seconds: float) -> bool:
        """Record the tokens of a batch, as the budget counts them, and its time; returns whether it is the
        first one.
        """
        self._speeds.append(planned / max(seconds, 1e-6))
        return len(self._speeds) == 1

    def may_search(self, rows: int, tokens: int, seconds: float) -> bool:
        """Record a batch, with its tokens without padding, for the search; returns whether to call `search`
        now.
        """
        return self._search is not None and self._search.see(rows, tokens, seconds)

    def search(self, batch: Batch) -> None:
        """Find the best token budget with batches like this one.

        This takes seconds. No other forward may be in progress.

        Raises
        ------
        DeviceLost
            The device failed.
        """
        if self._search is not None:
            self.token_budget = self._search.find(batch, self._headroom.most_rows)
            self._search = None

    def shrink(self, tokens: int) -> None:
        """Lower the budget to half of a batch that had no memory, and search no better one."""
        self.token_budget = max(1, min(self.token_budget, tokens // 2))
        self._search = None

    def fits(self, rows: int, length: int) -> bool:
        """Whether this many rows of this length are expected to fit into memory now."""
        return rows <= self._headroom.most_rows(length)

    def pieces(self, rows: int, length: int) -> Iterator[tuple[int, int]]:
        """Cut a batch that does not fit into pieces that do; yields the first row of each, and the row after
        its last.
        """
        self._headroom.log_cut(rows, length)
        done = 0
        while done < rows:
            end = min(done + self._headroom.most_rows(length), rows)
            yield done, end
            done = end

    def submit(self, backend: Backend, batch: Batch) -> Pending:
        """Begin a forward as `Backend.submit` does, and learn how much memory it needs."""
        return self._headroom.submit(backend, batch)


def first_budget(setting: int | str, device: str) -> int:
    """The first token budget; ``auto`` means the device's value."""
    return setting if isinstance(setting, int) else TOKEN_BUDGETS[device]
