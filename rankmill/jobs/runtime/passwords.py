"""Masks passwords of server URLs, and API keys, in text that is printed, logged or raised."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, quote, quote_plus, unquote, unquote_plus, urlsplit

_MASK = "***"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S*", re.IGNORECASE)
_OPTION = re.compile(r"[?&]([^=&?]*)=")

API_KEY_PREFIX = "rankmill"
API_KEY = re.compile(API_KEY_PREFIX + r"_([0-9a-f]{12})_[0-9a-f]{48}")
"""Matches the text of an API key of the gateway; the first group of the match is the key's id."""

_SHORT = 6
"""A known password with fewer characters than this is masked only as a whole word, because it may also be a
part of other words.
"""

_known: set[str] = set()


def remember_password(password: object) -> None:
    """Let `mask_passwords` mask this password in this process from now on."""
    if isinstance(password, bytes):
        password = password.decode(errors="replace")
    if isinstance(password, str) and password:
        _known.update({password, quote(password), quote(password, safe=""), quote_plus(password)})


def without_line_end(value: object) -> object:
    """Remove white space around a secret, such as the line end that files and ``echo`` add."""
    return value.strip() if isinstance(value, str) else value


def sendable_key(value: str | None) -> str | None:
    """Check that an HTTP header can contain an API key, and return the key.

    From now on, `mask_passwords` masks the key. Raises `ValueError` if a header cannot contain it.
    """
    remember_password(value)
    if value and not all("!" <= character <= "~" for character in value):
        raise ValueError("a key has ASCII letters, digits and signs, and no spaces: headers bring no others")
    return value


def remember_url(url: str) -> None:
    """Let `mask_passwords` mask the passwords of this URL in this process from now on."""
    try:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        passwords = [value for name in options if "pas" in name.lower() for value in options[name]]
        passwords.append(unquote(parts.password or ""))
    except ValueError:
        return  # the URL is not valid, and `mask_url` hides its passwords
    for password in passwords:
        remember_password(password)


def mask_url(url: str) -> str:
    """Mask the password of a URL, even if the URL is not valid.

    >>> mask_url("redis://me:a b@c/d@host:6379/0")
    'redis://me:***@host:6379/0'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    user, at, place = _mask_options(rest).rpartition("@")
    if ":" in user:  # the password may contain any character, so it ends at the last @
        user = f"{user.partition(':')[0]}:{_MASK}"
    return f"{scheme}://{user}{at}{place}"


def mask_passwords(text: str) -> str:
    """Replace passwords of URLs, all remembered passwords, and the secret parts of API keys with ``***``.

    >>> mask_passwords("no redis://me:p@ss@host:6379/0, nor redis://host?password=secret&db=1 there")
    'no redis://me:***@host:6379/0, nor redis://host?password=***&db=1 there'
    """
    for password in sorted(_known, key=len, reverse=True):
        whole = re.escape(password)
        text = re.sub(whole if len(password) >= _SHORT else rf"(?<!\w){whole}(?!\w)", _MASK, text)
    text = API_KEY.sub(rf"{API_KEY_PREFIX}_\1_{_MASK}", text)
    return _URL.sub(lambda match: mask_url(match[0]), text)


def _mask_options(text: str) -> str:
    """Mask passwords in the options of a URL: ``?password=secret&db=1`` becomes ``?password=***&db=1``."""
    parts, done = [], 0
    for option in _OPTION.finditer(text):
        if option.start() >= done and "pas" in unquote_plus(option[1]).lower():
            parts += [text[done : option.end()], _MASK]
            done = text.find("&", option.end()) % (len(text) + 1)  # the next &, or the end of the text
    return "".join([*parts, text[done:]])
