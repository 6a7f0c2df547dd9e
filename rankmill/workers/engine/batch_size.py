"""Decides the size of a batch by its padded tokens, its rows, and the memory that is free now.

The first size is the setting ``token_budget``; ``auto`` means the device's entry in `TOKEN_BUDGETS`, which is
in `jobs` because code without torch reads it too. With ``auto``, a batch of a slow model has fewer tokens, so
that the batch takes about half a second. If a batch does not fit into memory, the budget becomes at most half
of that batch. A batch that is not expected to fit (`rankmill.workers.engine.headroom`) is cut.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.engine.headroom import Headroom, memory_of
from rankmill.workers.models.loading import Model

_MIXED_SECONDS = 4.25
"""Chunks whose rows together take at most this long share batches, and the oldest chunks end first. So if all
processes die at once, only the scored rows of unfinished chunks are lost, which is less than 5 s of work with
batches of at most a second.
"""

_LEAST_TOKENS = 512
"""The budget of a slow model is not shortened below this number of tokens, because fewer cost speed (7% with
384 tokens, PyTorch on a CPU).
"""

_FIRST_SHARE = 4
"""The first batches have at most 1/4 of the budget's tokens, because the model may be slow."""

_FEWEST = 4
"""Fewest batches whose rows are cut together, because fewer would pad rows too much. Packed rows get this
number, and so do all rows until the time of a batch is known.
"""

_LATEST = 20
"""Number of latest batches whose times count."""

_BATCH_SECONDS = 0.5
"""Most seconds that a batch should take, because requests wait for it; smaller batches also pad less."""


class BatchSize:
    """The size of the batches of one model on one device.

    Parameters
    ----------
    token_budget
        Most padded tokens in a batch. `shrink` lowers it.
    max_rows
        Most rows in a batch.
    headroom
        Tells which batches fit into memory; by default all do.
    short_batches
        Whether a batch of a slow model has fewer tokens than the budget.

    >>> size = BatchSize(2048, short_batches=True)
    >>> size.tokens(), size.mixed_batches(512)
    (512, 4)
    >>> size.see(512, seconds=0.25)
    >>> size.tokens(), size.mixed_batches(1024)
    (1024, 8)
    """

    def __init__(
        self,
        token_budget: int,
        *,
        max_rows: int | None = None,
        headroom: Headroom | None = None,
        short_batches: bool = False,
    ) -> None:
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.headroom = headroom or Headroom()
        self._short_batches = short_batches
        self._speeds: deque[float] = deque(maxlen=_LATEST)

    @classmethod
    def of(cls, settings: WorkerSettings, model: Model) -> BatchSize:
        """Make the size of batches by a worker's settings."""
        device = model.backend.device
        max_rows = settings.max_batch if isinstance(settings.max_batch, int) else None
        return cls(
            first_budget(settings.token_budget, device),
            max_rows=max_rows,
            headroom=Headroom(memory_of(device)),
            short_batches=isinstance(settings.token_budget, str) and max_rows is None and not model.kind,
        )

    def tokens(self, *, share_prefixes: bool = False) -> int:
        """Most padded tokens in the next batches. Rows that share prefixes get the whole budget, because they
        gain from large batches.
        """
        if share_prefixes or not self._short_batches:
            return self.token_budget
        if not self._speeds:
            return max(self.token_budget // _FIRST_SHARE, 1)
        return min(self.token_budget, max(round(_BATCH_SECONDS * median(self._speeds)), _LEAST_TOKENS))

    def mixed_batches(self, tokens: int, *, packed: bool = False) -> int:
        """The number of batches with this many `tokens` whose rows are cut together.

        `packed` rows, which have no padding, get the fewest.
        """
        if packed or not self._speeds:
            return _FEWEST
        return max(round(_MIXED_SECONDS * median(self._speeds) / tokens), _FEWEST)

    def see(self, tokens: int, seconds: float) -> None:
        """Record the time of a batch with this many tokens, padding included."""
        self._speeds.append(tokens / max(seconds, 1e-6))

    def shrink(self, tokens: int) -> None:
        """Lower the budget to at most half the tokens of a batch that did not fit into memory."""
        self.token_budget = max(1, min(self.token_budget, tokens // 2))


def first_budget(setting: int | str, device: str) -> int:
    """The first token budget; ``auto`` means the device's value."""
    return setting if isinstance(setting, int) else TOKEN_BUDGETS[device]
