"""Passwords in the URLs of servers: whatever is printed, logged or raised goes through here."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, quote, quote_plus, unquote, unquote_plus, urlsplit

_MASK = "***"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S*", re.IGNORECASE)
_OPTION = re.compile(r"[?&]([^=&?]*)=")

_PLAIN = 6
"""A known password of fewer characters is replaced only where it stands alone: it may be part of any word."""

_known: set[str] = set()


def remember_password(password: object) -> None:
    """Never show this password again in this process, in whichever text."""
    if isinstance(password, bytes):
        password = password.decode(errors="replace")
    if isinstance(password, str) and password:
        _known.update({password, quote(password), quote(password, safe=""), quote_plus(password)})


def remember_url(url: str) -> None:
    """Never show the password of this URL again."""
    try:
        parts = urlsplit(url)
        found = [unquote(parts.password or ""), *parse_qs(parts.query).get("password", [])]
    except ValueError:
        return  # no server can be reached with it; `mask_url` shows nothing of it
    for password in found:
        remember_password(password)


def mask_url(url: str) -> str:
    """A URL without its password, however it is written, even where it is not valid.

    >>> mask_url("redis://me:a b@c/d@host:6379/0")
    'redis://me:***@host:6379/0'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    user, at, place = _mask_options(rest).rpartition("@")
    if ":" in user:  # the password may hold any sign, so it ends at the last @ only
        user = f"{user.partition(':')[0]}:{_MASK}"
    return f"{scheme}://{user}{at}{place}"


def mask_passwords(text: str) -> str:
    """Replace the passwords of all URLs in `text`, and those that were remembered, with ``***``.

    >>> mask_passwords("no redis://me:p@ss@host:6379/0, nor redis://host?password=secret&db=1 there")
    'no redis://me:***@host:6379/0, nor redis://host?password=***&db=1 there'
    """
    for password in sorted(_known, key=len, reverse=True):
        whole = re.escape(password)
        text = re.sub(whole if len(password) >= _PLAIN else rf"(?<!\w){whole}(?!\w)", _MASK, text)
    return _URL.sub(lambda found: mask_url(found[0]), text)


def _mask_options(text: str) -> str:
    """URLs without the passwords among their options, which end at the next & only."""
    parts, done = [], 0
    for option in _OPTION.finditer(text):
        if option.start() >= done and "pas" in unquote_plus(option[1]).lower():
            parts += [text[done : option.end()], _MASK]
            done = text.find("&", option.end()) % (len(text) + 1)  # or its end
    return "".join([*parts, text[done:]])
