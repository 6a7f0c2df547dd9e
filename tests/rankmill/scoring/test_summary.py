"""What the sums over a run's chunks say."""

from __future__ import annotations

import json

from rankmill.score.summary import Tally


def test_no_bound_is_stated_for_parts_of_the_release_before() -> None:
    """Its sums say nothing of bounds, and this release proves one for the rest of the output."""
    sums = {"tokens": 10, "how": [["torch", "cpu", "fp32"]], "revisions": ["commit"]}
    tally = Tally.read(json.dumps(sums))
    tally.bounds.add(1e-4)
    assert "bound" not in tally.proven()
    assert "bound" not in Tally.read(tally.written()).proven()
    own = Tally(how=tally.how, bounds={1e-4})
    assert Tally.read(own.written()).proven() == {"bound": "0.0001"}
    assert Tally.read("") == Tally()
