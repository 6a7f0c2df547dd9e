"""What an output was made from: a change is told in one line."""

from __future__ import annotations

from producer.files.manifest import differences, manifest


def test_a_changed_template_is_told_in_one_line() -> None:
    before, now = (
        manifest({}, ["m"], {"prompt_template": "{{ messages }}\n" * 9 + end, "label": "a"})
        for end in ("yes", "no")
    )
    assert differences(before, before) == ""
    told = differences(before, now)
    assert told.startswith("--prompt-template was '{{ messages }}\\n")
    assert "\n" not in told
    assert len(told) < 300
    assert differences(before, manifest({}, ["m"], {"label": "b"})).startswith("--label was a and is b")
