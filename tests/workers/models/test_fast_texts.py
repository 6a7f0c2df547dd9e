"""A fast tokenizer library is used where it has proven to be exact, and no longer than it is."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from rankmill.jobs.contract.home import shipped
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.installation import install_line
from rankmill.jobs.system import system
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.models import fast_texts
from rankmill.workers.models.description import describe
from rankmill.workers.models.fast_texts import (
    LIBRARIES,
    FastEncode,
    FastTexts,
    Untrusted,
    fast_tokens,
    slow_tokens,
)
from rankmill.workers.models.prompts import PromptTokenizer, tokenizer_for
from rankmill.workers.models.tokenizer import sample_pairs
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_decoder

DEMO = shipped("examples", "demo-model")
PLAIN = [f"a text of number {number}, far from here" for number in range(10_000)]


@pytest.fixture
def slow() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(autouse=True)
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those up to U+03FF, and few texts: the proof of all takes seconds."""
    monkeypatch.setattr(fast_texts, "CODES", range(0x400))
    monkeypatch.setattr(fast_texts, "RANDOM_TEXTS", 100)
    monkeypatch.setattr(fast_texts, "LONG_TEXTS", 0)


def wrong_for(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in a library that is right but for texts with `found`, of which it gets the last token wrong."""

    def make(text: str) -> FastEncode:
        whole = Tokenizer.from_str(text)

        def encode(texts: list[str]) -> tuple[Any, Any]:
            tokens = slow_tokens(whole, texts)
            for place, each in enumerate(texts):
                if found in each:
                    tokens.ids[tokens.offsets[place + 1] - 1] += 1
            return tokens.ids, tokens.offsets

        return encode

    monkeypatch.setitem(LIBRARIES, "WordPiece", ("nanotoken", make))


def check(found: Tokens, expected: Tokens) -> None:
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.offsets, expected.offsets)


@pytest.fixture
def proven(slow: Tokenizer, tmp_path: Path) -> FastTexts:
    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    return texts


def test_what_keeps_a_gpu_waiting_is_said_once_with_the_remedy(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, make = LIBRARIES["WordPiece"]
    monkeypatch.setitem(LIBRARIES, "WordPiece", ("no-such-library", make))
    texts = FastTexts(slow, tmp_path)
    assert not texts.settle()
    assert not texts.settle()
    (record,) = (each for each in caplog.records if each.name == fast_texts.logger.name)
    assert "no-such-library is missing" in record.message
    assert record.message.endswith(install_line("cuda"))


TEXTS = st.text(max_size=30) | st.sampled_from(["[SEP]", "the moon", "a[MASK]b", "e\u0301", "\U0001f319"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one tokenizer for all examples
@given(texts=st.lists(TEXTS, max_size=9))
def test_the_library_gives_the_ids_of_tokenizers(
    texts: list[str], proven: FastTexts, slow: Tokenizer
) -> None:
    check(proven(texts), slow_tokens(slow, texts))
    assert proven.is_fast


BYTE_PAIRS = st.text(max_size=30) | st.sampled_from(
    ["<|end|>", "the  moon", " \n\n far", "e\u0301", "\U0001f319\u200d\U0001f319", "it's 1999", "\u3000far"]
)


@pytest.fixture(scope="module")
def byte_pairs() -> Tokenizer:
    """As those of ModernBERT and GPT: pairs of bytes, words by a pattern, spaces as added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        [*PLAIN[:500], *["the", "moon", "is", "how", "far;", "it's", "你好"]], trainer
    )
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("  ", normalized=True)])
    return tokenizer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(BYTE_PAIRS, max_size=9))
def test_the_library_for_byte_pairs_gives_the_ids_of_tokenizers(
    texts: list[str], byte_pairs: Tokenizer, tmp_path: Path
) -> None:
    found = FastTexts(byte_pairs, tmp_path)
    assert found.settle()
    check(found(texts), slow_tokens(byte_pairs, texts))
    assert found.is_fast


def test_words_of_byte_pairs_are_compared_as_they_are_written(byte_pairs: Tokenizer, slow: Tokenizer) -> None:
    assert " number" in fast_texts._words(byte_pairs)
    assert "moon" in fast_texts._words(slow)


def test_prompts_are_tokenized_by_the_fast_library_too(tmp_path: Path) -> None:
    make_decoder(tmp_path / "model", "qwen2", task="causal", template=PAIR_TEMPLATE)
    about = describe(tmp_path / "model", None, tmp_path / "cache")
    spec = ScoreSpec(model=str(tmp_path / "model"))
    tokenizer = tokenizer_for(spec, about, 40)
    assert isinstance(tokenizer, PromptTokenizer)
    queries, passages = sample_pairs(about.tokenizer)
    expected = tokenizer(queries, passages)
    assert expected.lengths.max() == 40  # some are cut
    assert tokenizer.texts
    assert tokenizer.texts.settle()
    found = tokenizer(queries, passages)
    check(found, expected)
    assert found.shared is not None
    np.testing.assert_array_equal(found.shared, expected.shared)


def test_a_proof_is_kept_for_the_other_workers_of_the_host(
    proven: FastTexts, slow: Tokenizer, tmp_path: Path
) -> None:
    assert FastTexts(slow, tmp_path).is_fast
    slow.add_tokens(["moonlight"])
    assert not FastTexts(slow, tmp_path).is_fast


def test_no_short_run_pays_for_a_proof(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = FastTexts(slow, tmp_path)
    texts(PLAIN[:100])
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(fast_texts, "_AFTER_SECONDS", 0.0)
    texts(PLAIN[:100])
    assert (tmp_path / "tokenizers").exists()


def test_a_text_with_a_character_that_was_not_compared_goes_to_tokenizers(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_for("\u4f60", monkeypatch)
    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    some = ["the moon", "\u4f60\u597d the moon", "caf\u00e9", "\u4f60"]
    check(texts(some), slow_tokens(slow, some))


def test_a_library_is_used_for_texts_without_the_characters_it_gets_wrong(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_for("\u00f1", monkeypatch)
    monkeypatch.setattr(fast_texts, "RANDOM_TEXTS", 0)
    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    some = [*PLAIN[:50], "ma\u00f1ana", "caf\u00e9"]
    check(texts(some), slow_tokens(slow, some))


@pytest.mark.parametrize("found", ["1", "[SEP]"])
def test_a_library_that_fails_the_proof_is_not_used(
    found: str, slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_for(found, monkeypatch)
    assert not FastTexts(slow, tmp_path).settle()
    assert not FastTexts(slow, tmp_path).settle()
    (file,) = (tmp_path / "tokenizers").glob("*.json")
    assert "other ids" in json.loads(file.read_text())["wrong"]


def test_a_proof_that_cannot_be_kept_is_not_repeated(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_texts, "try_to_keep", lambda *_: None)  # as on a full disk
    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    check(texts(PLAIN[:50]), slow_tokens(slow, PLAIN[:50]))
    assert texts.is_fast
    wrong_for("1", monkeypatch)
    texts = FastTexts(slow, tmp_path)
    assert not texts.settle()
    assert texts.begin_proof() is None


@pytest.mark.parametrize("offsets", [[0, 5, 3], [1, 2, 3], [0, 2, 4], [0, 3]])
def test_offsets_that_do_not_fit_the_ids_are_refused(offsets: list[int]) -> None:
    with pytest.raises(Untrusted, match="offsets for 2 texts"):
        fast_tokens(lambda texts: (np.zeros(3, np.uint32), np.array(offsets, np.uint64)), ["a", "b"])


def test_the_first_wrong_sample_ends_the_use_of_a_library(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_for("number 4711,", monkeypatch)
    texts, other = FastTexts(slow, tmp_path), FastTexts(slow, tmp_path)
    assert texts.settle()
    monkeypatch.setattr(system, "uniform", lambda low, high: 4711.9)
    check(texts(PLAIN), slow_tokens(slow, PLAIN))
    assert not texts.is_fast
    assert "other ids for a text of 36 characters, among them none but ASCII" in str(texts.news())
    assert texts.news() is None
    assert "4711" not in caplog.text  # nobody's texts are in a log
    check(texts(PLAIN[4700:4720]), slow_tokens(slow, PLAIN[4700:4720]))
    assert not FastTexts(slow, tmp_path).settle()
    assert not other.settle()


def test_a_sample_of_all_texts_is_compared(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sizes of the calls are: one of 256."""
    compared: list[str] = []

    def watched(tokenizer: Tokenizer, some: list[str]) -> Tokens:
        compared.extend(some)
        return slow_tokens(tokenizer, some)

    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    monkeypatch.setattr(fast_texts, "slow_tokens", watched)
    for start in range(0, 2560, 20):
        texts(PLAIN[start : start + 20])
    assert len(compared) == 10
    texts(PLAIN[:2560])
    assert len(set(compared)) > 10


def test_other_processes_of_the_host_follow(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_for("number 4711,", monkeypatch)
    monkeypatch.setattr(fast_texts, "_SAMPLE", 1)
    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    other = FastTexts(slow, tmp_path)
    assert other.is_fast
    texts(PLAIN[4711:4712] * 9)
    check(other(PLAIN[:9]), slow_tokens(slow, PLAIN[:9]))
    assert not other.is_fast
    assert "another process" in str(other.news())


def test_a_library_that_panics_is_left(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    def make(text: str) -> FastEncode:
        def encode(texts: list[str]) -> tuple[Any, Any]:
            if "panic" in texts:
                raise PanicException("index out of bounds")
            tokens = slow_tokens(slow, texts)
            return tokens.ids, tokens.offsets

        return encode

    monkeypatch.setitem(LIBRARIES, "WordPiece", ("nanotoken", make))
    texts = FastTexts(slow, tmp_path)
    assert texts.settle()
    check(texts(["panic"]), slow_tokens(slow, ["panic"]))
    assert texts.news() == "PanicException: index out of bounds"


ENDING = """
import signal, sys
from pathlib import Path
from tokenizers import Tokenizer
from rankmill.workers.models.fast_texts import LIBRARIES, FastTexts

LIBRARIES["WordPiece"] = "nanotoken", lambda text: lambda texts: signal.raise_signal(int(sys.argv[3]))
FastTexts(Tokenizer.from_file(sys.argv[1]), Path(sys.argv[2])).settle()
"""


def end_a_proof(cache: Path, signum: signal.Signals) -> None:
    """A worker whose proof of a library ends with a signal."""
    words = [sys.executable, "-c", ENDING, str(DEMO / "tokenizer.json"), str(cache), str(int(signum))]
    assert subprocess.run(words, check=False).returncode == -signum


def test_a_library_that_crashes_a_worker_is_not_tried_again(slow: Tokenizer, tmp_path: Path) -> None:
    end_a_proof(tmp_path, signal.SIGSEGV)
    assert FastTexts(slow, tmp_path).begin_proof() is None
    (file,) = (tmp_path / "tokenizers").glob("*.json")
    assert json.loads(file.read_text())["wrong"] == "a worker crashed while it compared it"


def test_workers_that_are_killed_during_the_proof_do_not_end_the_use_of_a_library(
    slow: Tokenizer, tmp_path: Path
) -> None:
    """So end the workers of each short score-file: after three of them no worker of the host was fast."""
    for _ in range(3):
        end_a_proof(tmp_path, signal.SIGKILL)
    assert FastTexts(slow, tmp_path).settle()


def test_one_process_of_a_host_proves_at_a_time(
    slow: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(FastTexts, "_prove", lambda self, make, lock: held.append(lock))
    first, second = FastTexts(slow, tmp_path), FastTexts(slow, tmp_path)
    assert first.begin_proof()
    assert second.begin_proof() is None


def test_a_model_tokenizes_with_what_is_known_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = describe(DEMO, None, tmp_path).joiner
    assert first
    assert not first.texts.is_fast
    assert first.texts.settle()
    assert "nanotoken tokenizes from now on" in caplog.text
    joiner = describe(DEMO, None, tmp_path).joiner
    assert joiner
    assert joiner.texts.is_fast
    for length in (4, 8, 64):
        found = joiner.tokenize(["how far is the moon"] * 2, ["far", "the moon " * 99], length)
        expected = first.tokenize(["how far is the moon"] * 2, ["far", "the moon " * 99], length)
        check(found, expected)
