"""Defines the probes: the pairs with which a worker checks that a model's scores are those of transformers.

Some probes are short, long, empty, equal or over the model's limit, and the probes are in many scripts. For a
model of single texts, only a probe's passage is scored. For a reward model, a probe is a question and an
answer; in some probes, other messages precede the question.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rankmill.jobs.contract.schema import Inputs
from rankmill.workers.models.conversations import Messages, exchange

LONGEST = 512
"""Probes (test pairs) are cut to at most this many tokens when their scores are compared. For BigBird, they
may be longer.
"""

_TEXT = (
    "the moon is far away and nobody knows how long a river flows under old stone bridges before it meets "
    "the sea where small boats carry bread tea and 17 letters home each morning while kings dream of cats"
)
_WORDS = _TEXT.split()


class Probe(NamedTuple):
    """A pair of texts with which a worker checks a model's scores.

    ``before`` has the earlier messages of a conversation, each as role and content. If ``is_null``, the row
    has no text, and so no score.
    """

    query: str
    passage: str
    before: tuple[tuple[str, str], ...] = ()
    is_null: bool = False

    @property
    def messages(self) -> Messages:
        earlier = [{"role": role, "content": content} for role, content in self.before]
        return [*earlier, *exchange(self.query, self.passage)]


def _words(count: int, start: int = 0, step: int = 7) -> str:
    return " ".join(_WORDS[(start + step * place) % len(_WORDS)] for place in range(count))


def _alike(first: str, last: str, count: int) -> list[str]:
    """Make `count` texts of about equally many tokens, which begin with `first` and end with `last`."""
    words = _WORDS[1:12]
    return [" ".join([first, *words[turn:], *words[:turn], last]) for turn in range(count)]


_SHORT = (
    ("how far is the moon", "The moon is 384,400 km away."),
    ("how far is the moon", "Bread is baked at 220 degrees."),
    ("how far is the moon", "It takes light a little more than a second."),
    ("how far is the moon", ""),
    ("The moon is 384,400 km away.", "how far is the moon"),
    ("", ""),
    ("", "A passage without a query."),
    ("a", "b"),
    ("why", "why"),
    ("wie weit ist der Mond", "Der Mond ist im Mittel 384.400 km von der Erde entfernt: größer als gedacht."),
    ("月はどのくらい遠いですか", "月までの距離は約38万4400キロです。"),
    ("月亮有多远", "月球距离地球约38万公里。"),
    ("как далеко луна", "Луна находится в 384 тысячах километров."),
    ("كم يبعد القمر", "يبعد القمر حوالي ٣٨٤ ألف كيلومتر."),
    ("चाँद कितनी दूर है", "चाँद लगभग ३,८४,४०० किमी दूर है।"),
    ("émojis 🌕🚀?", "Ça fait 384 400 km 🌍→🌕!"),
    ("x = y[0] + f(z);", "def f(z): return {'a': z ** 2}  # http://example.org/?q=1&r=%20"),
    ("  spaces\tand\nlines ", " are  not \r\n all the same "),
    ("[SEP] [MASK] <s> </s>", "special [CLS] words <pad> in a text"),
    ("donaudampfschifffahrtsgesellschaft", "a" * 40),
    ("a\x00b \u200bc\ufeff \x1fd", "two\u00a0words\x00, \u202eone\u00adword\u2028 and the end"),
    ("   ", " \n"),
    ("Straße", "café au lait"),
    ("straße", "café au lait "),
    ("STRASSE", "cafe\u0301 au lait"),
    ("Strasse", "Café au lait"),
    ("Straße", "cafe au lait"),
)

_NULL = Probe("", "", is_null=True)

_SAME = _words(45, 3, 11)
"""The common beginning of the texts of several probes; it has more than 200 characters."""

_MOON, _SEA = f"{_SAME} moon", f"{_SAME} sea"

_LENGTHS = (16, 56, 88, 120, 184, 248, 376)
"""Numbers of words in the passages of some probes. These pairs have about 24, 64, 96, 128, 192, 256 and 384
tokens.
"""

_SYSTEM = (("system", "Be brief."),)
_TURNS = (("user", "how far is the moon"), ("assistant", "Nobody knows."))

SCORED = (
    Probe(_words(2 * LONGEST, 0, 11), _words(2 * LONGEST, 3)),
    *(Probe(*pair) for pair in _SHORT[:2]),
    _NULL,
    *(Probe(*pair) for pair in _SHORT[2:]),
    *(Probe("how far is it from here to the sea", text, _TURNS) for text in _alike("It", "now", 8)),
    Probe(_words(5), _words(24, 5), _SYSTEM),
    Probe(_words(5), _words(40, 9, 5), _SYSTEM + _TURNS),
    Probe("where", _MOON),
    Probe("where", _SEA),
    Probe("where", _MOON),
    Probe(_SEA, "where"),
    Probe(_MOON, "where"),
    _NULL,
    *(Probe(_words(5, length), _words(length, length, 5)) for length in _LENGTHS),
    _NULL,
)
"""The probes whose scores are compared with those of transformers. The first probe is the longest, and both
of its texts are cut; some probes are equal, or almost equal.
"""

OF_SPECS = tuple(SCORED[place] for place in (1, 4, 6, 8, 12, 17, 22, 25, 37)) + SCORED[-5:-1]
"""The probes whose tokens are compared with transformers', if a spec has options that change tokens."""

AT_THE_LIMIT = (
    Probe("how far is the moon", "{long}"),
    Probe("{long}", "The moon is far away."),
    Probe("{long}", "{long}"),
    Probe("é {long}", "🌕 {long}"),
)
"""Pairs over the model's limit, whose tokens are compared with transformers'. ``{long}`` stands for more
words than the limit, but for at most 20,000.
"""

_MOST_WORDS = 20_000


def columns_of(probes: Sequence[Probe], inputs: Inputs) -> list[list[str | None]]:
    """Put probes into the columns of a chunk whose rows are of the kind `inputs`, with ``None`` for null
    probes.
    """

    def column(text: Callable[[Probe], str]) -> list[str | None]:
        return [None if probe.is_null else text(probe) for probe in probes]

    if inputs == "texts":
        return [column(lambda probe: probe.passage)]
    if inputs == "conversations":
        return [column(lambda probe: json.dumps(probe.messages))]
    return [column(lambda probe: probe.query), column(lambda probe: probe.passage)]


def scored_length(config: Any) -> int:
    """Return the number of tokens to which scored probes are cut, unless the model's own limit is smaller.
    BigBird's probes are so long that its attention is sparse.
    """
    if config.model_type in {"big_bird", "bigbird_pegasus"} and config.attention_type == "block_sparse":
        return max(LONGEST, (5 + 2 * int(config.num_random_blocks)) * int(config.block_size) + 8)
    return LONGEST


def over_the_limit(limit: int) -> list[Probe]:
    """Make the pairs of `AT_THE_LIMIT` for a model whose limit is `limit` tokens."""
    text = _words(min(limit + 8, _MOST_WORDS), 1)
    return [
        Probe(query.replace("{long}", text), passage.replace("{long}", text))
        for query, passage, *_ in AT_THE_LIMIT
    ]
