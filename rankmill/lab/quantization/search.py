"""Search for the layers to leave out of 8 bits. Only rankings steer it, so it gives the same each time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankmill.lab.quantization.calibration import Layer
from rankmill.lab.tuning.precision_check import Measured

_MOST = 0.5
"""Largest share of the matrix products to leave out: with more, bf16 is faster and more exact."""

_FREE = 0.02
"""Largest share of the matrix products that costs next to no speed."""


@dataclass(frozen=True)
class Trial:
    """A measured model with some layers left out of 8 bits.

    Attributes
    ----------
    left_out
        Names of these layers.
    share
        Their share of the matrix products.
    measured
        How the model ranks, compared with fp32.
    kept
        Whether its rankings are shown to reach the threshold.
    """

    left_out: tuple[str, ...]
    share: float
    measured: Measured
    kept: bool

    @property
    def spearman(self) -> float:
        """Spearman's rank correlation with fp32, the mean over the queries."""
        return self.measured.agreement.spearman


class Search:
    """The search for the fewest products to leave out: none, then one group of layers, then several groups.

    Parameters
    ----------
    layers
        Layers that can be in 8 bits, in the model's order.
    measure
        Scores the pairs with the named layers left out.
    threshold
        Spearman's rank correlation to reach.
    trials
        Most models to measure. It is not a time limit, with which the result would depend on the machine.

    Attributes
    ----------
    trials
        The measured models, in order; the first leaves nothing out.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        measure: Callable[[tuple[str, ...]], Measured],
        threshold: float,
        trials: int,
    ) -> None:
        self._shares = {layer.name: layer.share for layer in layers}
        self._measure, self._threshold, self._most = measure, threshold, trials
        self.trials: list[Trial] = []

    def run(self) -> Trial:
        """The model with the fewest products left out that keeps the threshold.

        If none does, the best of the models that leave out next to nothing: leaving out more would cost speed
        without reaching the threshold.
        """
        plain = self._try(frozenset())
        singles: list[Trial] = []
        for group in sorted(groups(list(self._shares)), key=self._share):
            if self._done:
                break
            singles.append(self._try(group))
        helpful = [each for each in singles if each.spearman > plain.spearman]
        together: frozenset[str] = frozenset()
        for each in sorted(helpful, key=lambda one: (plain.spearman - one.spearman) / one.share):
            before, together = together, together | set(each.left_out)
            if self._done or self._share(together) > _MOST:
                break
            if before and together != before:  # a single group has been measured already
                self._try(together)
        kept = [each for each in self.trials if each.kept]
        free = [each for each in self.trials if each.share <= _FREE]
        return min(kept, key=lambda one: one.share) if kept else max(free, key=lambda one: one.spearman)

    @property
    def _done(self) -> bool:
        return self.trials[-1].kept or len(self.trials) >= self._most

    def _share(self, names: frozenset[str]) -> float:
        return sum(share for name, share in self._shares.items() if name in names)

    def _try(self, names: frozenset[str]) -> Trial:
        left_out = tuple(name for name in self._shares if name in names)
        measured = self._measure(left_out)
        kept = measured.agreement.verdict(self._threshold) == "kept" and not measured.lost
        self.trials.append(Trial(left_out, self._share(names), measured, kept))
        return self.trials[-1]


def groups(names: Sequence[str]) -> list[frozenset[str]]:
    """Groups of layers to leave out together: each kind of layer in all blocks; the first block; the last."""
    kinds: dict[str, set[str]] = {}
    blocks: dict[int, set[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), set()).add(name)
        if number := re.search(r"\.(\d+)\.", name):
            blocks.setdefault(int(number[1]), set()).add(name)
    ends = [blocks[min(blocks)], blocks[max(blocks)]] if blocks else []
    return list(dict.fromkeys(map(frozenset, [*kinds.values(), *ends])))
