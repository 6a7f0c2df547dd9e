"""The fuzzer's checks can fail: what they must find, and what they must not take for a finding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.fuzz import CHUNK, PAIRS, Fuzz
from rankmill import Scores


@pytest.fixture
def found(tmp_path: Path) -> Fuzz:
    """A fuzzer without processes."""
    fuzz = object.__new__(Fuzz)
    fuzz.findings, fuzz.failed_attempts, fuzz.folder = [], Counter(), tmp_path
    fuzz.expected = Scores.of([np.arange(len(PAIRS), dtype=np.float32)], {})
    return fuzz


@pytest.mark.parametrize(
    ("score", "errors", "altered", "finding"),
    [
        (3.0, {}, set(), ""),
        (4.0, {}, set(), "row 3 has 4.0, not 3.0"),
        (np.nan, {}, set(), "row 3 has nan"),
        (np.nan, {3: "its worker died"}, set(), ""),
        (3.0, {3: "both"}, set(), "row 3 has 3.0"),
        (np.nan, {3: "two\nlines"}, set(), "not one line"),
        (4.0, {}, {0}, ""),
        (4.0, {}, {CHUNK}, "row 3 has 4.0"),
    ],
)
def test_wrong_scores_of_a_damaged_run_are_findings(
    score: float, errors: dict[int, str], altered: set[int], finding: str, found: Fuzz
) -> None:
    scores = found.expected.copy()
    scores[3] = score
    found._check_scores(scores, errors, altered, "payload")
    assert bool(found.findings) == bool(finding)
    assert finding in "".join(found.findings)


def test_tracebacks_in_logs(found: Fuzz) -> None:
    log = found.folder / "worker-1.log"
    attempt = "Traceback\\n\\nx.OddError: no"
    log.write_text(f'{{"message": "exception raised while executing", "exception": "{attempt}"}}\n')
    found._check_logs()
    assert (found.findings, sum(found.failed_attempts.values())) == ([], 1)
    log.write_text('{"message": "heartbeat failed", "exception": "Traceback (most recent call last)"}\n')
    found._check_logs()
    assert "heartbeat failed" in found.findings[0]
