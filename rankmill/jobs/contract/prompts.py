"""Prompt templates in Jinja, given by name, as a file or as text; a run's spec has the text."""

from __future__ import annotations

import re

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.home import expanded, shipped

TEXTS_ALONE = "none"
"""The name to give in place of a template if the model should read query and passage without a prompt."""

MAX_TEMPLATE_CHARS = 64 << 10

_SHIPPED = shipped("configs", "prompts")
_ANSWERS = re.compile(r"\A\{#-?\s*answers:\s*(\S+)(?:\s+(?!-?#\})(\S+))?\s*-?#\}")


def shipped_templates() -> list[str]:
    """Names of the templates that come with rankmill."""
    return sorted(path.stem for path in _SHIPPED.glob("*.jinja"))


def read_template(given: str | None) -> str | None:
    """Return the text of a template. ``None`` and ``none`` are returned unchanged.

    Parameters
    ----------
    given
        The name of a shipped template, the path of a file, the text itself, ``none`` or ``None``.

    Raises
    ------
    ConfigError
        The file does not exist, cannot be read, is too long, or is not a template.
    """
    if given is None or given == TEXTS_ALONE or "{{" in given:
        return given
    shipped = _SHIPPED / f"{given}.jinja"
    path = shipped if given in shipped_templates() else expanded(given)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"prompt_template: {given} is not a template ({reason}): give a Jinja file, or one of "
            f"{', '.join(shipped_templates())}, {TEXTS_ALONE}"
        ) from None
    if "{{" not in text or len(text) > MAX_TEMPLATE_CHARS:
        raise ConfigError(
            f"prompt_template: {given} is not a Jinja template that prints a query and a passage in at most "
            f"{MAX_TEMPLATE_CHARS:,} characters"
        )
    return text


def check_text(given: str | None) -> None:
    """Check that a prompt template from another process is not a path: a path would be read on this host.

    Raises
    ------
    ConfigError
        The template may be a path.
    """
    if not (given is None or given == TEXTS_ALONE or "{{" in given or given in shipped_templates()):
        raise ConfigError(
            f"prompt_template: {given!r:.80} is not a template: an order holds its text, not its path"
        )


def answers_of(template: str | None) -> tuple[str, str | None] | None:
    """Return the tokens for yes and no in a model's answer, as its prompt template names them in a comment.

    Return ``None`` if the template does not begin with such a comment. The second token is ``None`` if the
    comment names only one.

    >>> answers_of("{# answers: yes no #}{{ messages }}")
    ('yes', 'no')
    """
    match = _ANSWERS.match(template or "")
    return (match[1], match[2]) if match else None
