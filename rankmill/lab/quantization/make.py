"""Making a model directory for 8 bits: calibrate, search for layers to leave out, write."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import OutputError
from rankmill.jobs.contract.spec import RECIPE, RECIPE_FORMAT
from rankmill.jobs.registry.documents import Manifest, parse_reference
from rankmill.jobs.registry.registry import Registry, fetch_files
from rankmill.jobs.runtime.settings import Settings
from rankmill.lab.quantization.calibration import Calibrated, calibrate
from rankmill.lab.quantization.pairs import Pairs
from rankmill.lab.quantization.search import Search, Trial
from rankmill.lab.tuning.pairs import fingerprint
from rankmill.lab.tuning.precision_check import REFERENCE, Measured, compare, score_in
from rankmill.score.session import RunScores, Session

_PACKAGES = ("rankmill", "torch", "transformers", "openvino", "nncf")


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
    best: Trial
    trials: list[Trial]


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
    """Calibrate a model, measure what to leave out of 8 bits, and write the directory.

    Parameters
    ----------
    settings
        The model, and settings for the workers that measure.
    pairs
        From `read_pairs`.
    output
        The directory to make; it appears when it is complete.
    threshold, trials
        As in `Search`.
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
    """
    check_output(output, force)
    with _made_whole(output) as (whole, scratch):
        ours = {"backend": "openvino", "device": "cpu", "redis_url": None, "cache_dir": str(scratch)}
        settings, version = _fetched(settings.model_copy(update=ours), scratch, say)
        name = str(version or settings.model)
        say(f"calibrating {name} on {len(pairs.calibrated):,} pairs")
        found = calibrate(settings, pairs.calibrated, pairs.columns.names, whole)
        with Session(settings) as session:
            quantized = _measure(session, found, pairs, whole, threshold, trials, say)
        made_from = {
            "name": name, "revision": version.content if version else found.revision, "digest": found.digest
        }  # fmt: skip
        report = {"model": made_from, **_report(settings, pairs, threshold, quantized)}
        _write_recipe(whole, quantized.best.left_out, report)
    return quantized


def _fetched(
    settings: Settings, scratch: Path, say: Callable[[str], None]
) -> tuple[Settings, Manifest | None]:
    """The settings with a folder as their model where they name one of a registry, and its manifest."""
    reference = parse_reference(settings.model)
    if reference is None:
        return settings, None
    registry = Registry.of(settings)
    manifest = registry.manifest(registry.version(reference))
    say(f"fetching {manifest}")
    fetch_files(registry, manifest, scratch / "model", scratch / "parts")
    return settings.model_copy(update={"model": str(scratch / "model")}), manifest


def check_output(output: Path, force: bool) -> None:
    """Check that the directory may be made; raises `OutputError`."""
    if not os.path.lexists(output):
        return
    if not force:
        raise OutputError(f"{output} is there; choose another directory, or --force to replace it")
    if output.is_symlink() or not (output / RECIPE).is_file():
        raise OutputError(f"{output} was not made by rankmill quantize and is not replaced")


def _measure(
    session: Session,
    found: Calibrated,
    pairs: Pairs,
    whole: Path,
    threshold: float,
    trials: int,
    say: Callable[[str], None],
) -> Quantized:
    table, columns = pairs.measured, pairs.columns
    queries = table[columns.query].to_pylist()
    labels = None if pairs.label is None else table[pairs.label].to_pylist()

    def beside(scored: RunScores, what: str) -> Measured:
        measured = compare(scored, reference, queries, labels)
        say(f"{what}: Spearman {measured.agreement}")
        return measured

    def with_left_out(left_out: tuple[str, ...]) -> Measured:
        _write_recipe(whole, left_out, {})
        share = sum(layer.share for layer in found.layers if layer.name in left_out)
        scored = score_in(session, table, columns, "int8", model=str(whole), revision=None)
        return beside(scored, f"quantized, {1 - share:.1%} of the products in 8 bits")

    say(f"measuring on {len(table):,} pairs")
    reference = score_in(session, table, columns, REFERENCE, revision=found.revision)
    plain = beside(score_in(session, table, columns, "int8", revision=found.revision), "8 bits as they come")
    search = Search(found.layers, with_left_out, threshold, trials)
    best = search.run()
    return Quantized(compare(reference, reference, queries, labels), plain, best, search.trials)


def _write_recipe(whole: Path, left_out: tuple[str, ...], report: dict[str, Any]) -> None:
    """Replace the recipe atomically: workers that measure may read it at the same time."""
    recipe = {"format": RECIPE_FORMAT, "left_out": left_out, **report}
    new = whole.with_name("recipe.new")
    new.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    new.replace(whole / RECIPE)


def _report(settings: Settings, pairs: Pairs, threshold: float, quantized: Quantized) -> dict[str, Any]:
    """The report in the recipe; it has no times, so that the same input makes the same file."""
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


def _trial(trial: Trial) -> dict[str, Any]:
    share = round(1 - trial.share, 6)
    return {"left_out": trial.left_out, "share_in_8_bits": share, **_figures(trial.measured)}


def _figures(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured.agreement), "ndcg": measured.ndcg, "lost": measured.lost}


@contextmanager
def _made_whole(output: Path) -> Iterator[tuple[Path, Path]]:
    """A folder that becomes `output` at the end, and a scratch folder that is deleted."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.making-") as making:
            whole, scratch = Path(making) / "whole", Path(making) / "scratch"
            whole.mkdir()
            scratch.mkdir()
            yield whole, scratch
            for file in whole.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if output.exists():
                output.rename(scratch / "before")
            whole.rename(output)
    except OSError as error:
        shown = error.filename or output
        raise OutputError(f"cannot write {shown}: {error.strerror or error}") from error
