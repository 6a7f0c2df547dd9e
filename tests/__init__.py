"""Tests, laid out as the rooms are; `tests.harness` has what they share."""

import pytest

pytest.register_assert_rewrite("tests.harness")
