"""ScoringWorkers that do what they are told to: raise, run out of memory, die, hang, take their time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rankmill import plugins
from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.spec import ScoreSpec, in_precision
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.backends.auto import backends
from rankmill.workers.backends.base import Backend, DeviceLost, OutOfMemory, Pending
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine import pipeline
from rankmill.workers.models.loading import Loaded
from rankmill.workers.worker import ScoringWorker

MARKS = ("raise", "exhaust", "kill", "hang", "hold")


class MisbehavingBackend:
    """Another backend, except batches with a marked row; counts its forwards in a file."""

    shares_prefixes = False
    packs = False
    pieces = 1

    def __init__(self, real: Backend, tokenizer: Any) -> None:
        self.name, self.device, self.precision = real.name, real.device, real.precision
        self.depth, self.bytes = real.depth, real.bytes
        self._real = real
        self._marks = {mark: tokenizer.backend_tokenizer.token_to_id(mark) for mark in MARKS}
        self._log = Path(os.environ["FORWARDS"])

    def submit(self, batch: Batch) -> Pending:
        with self._log.open("a") as log:
            log.write(f"{len(batch.ids)}\n")
        found = {mark for mark, token in self._marks.items() if (batch.ids == token).any()}
        if "kill" in found:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in found and not self._log.with_name("hung").exists():
            self._log.with_name("hung").touch()
            time.sleep(600)
        while "hold" in found and not self._log.with_name("go").exists():
            time.sleep(0.05)
        if "exhaust" in found:
            raise OutOfMemory("too much")
        if "raise" in found:
            raise ValueError("cannot be scored")
        return self._real.submit(batch)


class MisbehavingWorker(ScoringWorker):
    """Loads models as ever, and wraps their backends."""

    def load(self, spec: ScoreSpec) -> Loaded:
        stumbles = Path(os.environ["FORWARDS"]).with_name("stumble")
        if stumbles.exists():
            stumbles.unlink()
            raise OSError("stumbled")
        time.sleep(float(os.environ.get("LOAD_SECONDS", "0")))
        loaded = super().load(spec)
        return replace(loaded, backend=MisbehavingBackend(loaded.backend, loaded.about.tokenizer))

    def _prepare(self, settings: WorkerSettings) -> None:
        if "WEDGED_SECONDS" in os.environ:
            pipeline.FIRST_BATCH_SECONDS = pipeline.LATER_BATCH_SECONDS = int(os.environ["WEDGED_SECONDS"])
        super()._prepare(settings)


class BrokenDevice:
    """Another backend, whose logits are wrong as soon as the file that ``BROKEN`` names is there."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def submit(self, batch: Batch) -> Pending:
        pending = self._real.submit(batch)
        return _Wrong(pending) if Path(os.environ["BROKEN"]).exists() else pending


class _Wrong:
    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def result(self) -> Any:
        return self._pending.result() + 0.01


class BrokenDeviceWorker(ScoringWorker):
    """Scores on a `BrokenDevice`, and the probes again after half a second."""

    def _prepare(self, settings: WorkerSettings) -> None:
        from rankmill.workers.engine import engine
        from rankmill.workers.models import loading

        load = loading._load_backend
        loading._load_backend = lambda *args: BrokenDevice(load(*args))
        engine.PROVE_SECONDS = 0.5
        super()._prepare(settings)


class LargeModelWorker(ScoringWorker):
    """Finds each model too large to compare it in fp32."""

    def _prepare(self, settings: WorkerSettings) -> None:
        from rankmill.workers.engine import proving

        proving._LARGEST = 0
        super()._prepare(settings)


class HeldProofWorker(ScoringWorker):
    """Scores no probes itself before the file that ``PROVE`` names is there."""

    def _prepare(self, settings: WorkerSettings) -> None:
        from rankmill.workers.engine.probing import Probed

        companies = Probed.companies

        def companies_in_time(*given: Any, **named: Any) -> Any:
            while not Path(os.environ["PROVE"]).exists():
                time.sleep(0.05)
            return companies(*given, **named)

        Probed.companies = companies_in_time  # type: ignore[method-assign]
        super()._prepare(settings)


class LostDeviceWorker(ScoringWorker):
    """Loses its device while it loads a model."""

    def load(self, spec: ScoreSpec) -> Loaded:
        raise DeviceLost("the device is gone")


class BrokenPackageWorker(ScoringWorker):
    """Has a package with a backend that cannot be imported."""

    def load(self, spec: ScoreSpec) -> Loaded:
        broken = EntryPoint("broken", "no_such_module:KIND", "rankmill.backends")
        vars(plugins)["entry_points"] = lambda group: [*entry_points(group=group), broken]
        plugins._named.cache_clear()
        backends.cache_clear()
        return super().load(spec)


class UncutWorker(ScoringWorker):
    """Cuts no long passage into windows."""

    def _prepare(self, settings: WorkerSettings) -> None:
        from rankmill.workers.models import loading

        make = loading.Model
        vars(loading)["Model"] = lambda **fields: make(**fields | {"windows": None})
        super()._prepare(settings)


class PatientWorker(ScoringWorker):
    """Loads no model before the file that ``LOAD`` names is there."""

    def load(self, spec: ScoreSpec) -> Loaded:
        while not Path(os.environ["LOAD"]).exists():
            time.sleep(0.05)
        return super().load(spec)


class EndlessWorker(ScoringWorker):
    """Never loads a model whose name has ``endless``, nor one with ``deaf``, which hears no signal either.

    These have a second for it; others have as long as a busy machine takes.
    """

    def _load(self, spec: ScoreSpec) -> Loaded:
        from rankmill.workers import worker
        from rankmill.workers.rq import worker as rq_worker

        worker.LOAD_SECONDS = 1 if "endless" in spec.model or "deaf" in spec.model else 300
        rq_worker._GRACE_SECONDS = 1.0
        return super()._load(spec)

    def load(self, spec: ScoreSpec) -> Loaded:
        if "deaf" in spec.model:
            lock = ctypes.create_string_buffer(64)
            while True:
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        while "endless" in spec.model:
            with suppress(Exception):
                time.sleep(0.05)
        return super().load(spec)


class ReadingWorker(ScoringWorker):
    """Reads no weights in a folder ``large`` for a digest before the file that ``READ`` names is there."""

    def _prepare(self, settings: WorkerSettings) -> None:
        file_digest = hashlib.file_digest

        def digest_in_time(file: Any, *how: Any) -> Any:
            while "/large/" in file.name and not Path(os.environ["READ"]).exists():
                time.sleep(0.05)
            return file_digest(file, *how)

        hashlib.file_digest = digest_in_time  # type: ignore[assignment]
        super()._prepare(settings)


class OddWorker(ScoringWorker):
    """On a host of its own: ``AUTO`` is what auto means, ``LACKS`` and ``GONE`` what it has not.

    ``OTHER`` is the directory that is at each model's path there.
    """

    def load(self, spec: ScoreSpec) -> Loaded:
        if spec.precision == os.environ.get("LACKS"):
            raise WorkerError(f"precision {spec.precision} is not supported on cpu; use another")
        if spec.precision == "auto" and "AUTO" in os.environ:
            spec = in_precision(spec, os.environ["AUTO"])
        return super().load(spec)

    def _prepare(self, settings: WorkerSettings) -> None:
        from rankmill.workers.models import sources

        locate = sources.locate

        def locate_here(name: str) -> str | Path:
            if "OTHER" in os.environ:
                return Path(os.environ["OTHER"])
            return locate("/gone/model" if name == os.environ.get("GONE") else name)

        sources.locate = locate_here
        super()._prepare(settings)


class WrongTokensWorker(MisbehavingWorker):
    """Its tokenizer library is wrong for texts with ``bread king``, and compared where one has ``tell``."""

    def _prepare(self, settings: WorkerSettings) -> None:
        from tokenizers import Tokenizer

        from rankmill.workers.models import fast_texts

        def make(text: str) -> fast_texts.FastEncode:
            whole = Tokenizer.from_str(text)

            def encode(texts: list[str]) -> tuple[Any, Any]:
                tokens = fast_texts.slow_tokens(whole, texts)
                for place, each in enumerate(texts):
                    if "bread king" in each:
                        tokens.ids[tokens.offsets[place + 1] - 1] = 0
                return tokens.ids, tokens.offsets

            return encode

        compare = fast_texts.FastTexts._differing

        def differing(self: Any, texts: list[str], tokens: Any) -> str | None:
            return compare(self, texts, tokens) if any("tell" in text for text in texts) else None

        fast_texts.LIBRARIES["WordPiece"] = ("nanotoken", make)
        fast_texts.FastTexts._differing = differing  # type: ignore[method-assign]
        fast_texts._SAMPLE = 1
        fast_texts.CODES = list(range(128))
        fast_texts.RANDOM_TEXTS = fast_texts.LONG_TEXTS = 0
        super()._prepare(settings)

    def load(self, spec: ScoreSpec) -> Loaded:
        loaded = super().load(spec)
        joiner = loaded.about.joiner
        assert joiner
        assert joiner.texts.settle()
        return loaded
