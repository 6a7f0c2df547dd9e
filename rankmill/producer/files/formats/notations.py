"""Types of untyped columns: a type is chosen only if it writes every value exactly as it was read.

Read as a number, ``007`` would be written as ``7``, so a column that contains it is text. The notations of a
column are those that all of its values follow. A column in several files has those that are common to all of
them, so it has the same type in all of them.
"""

from __future__ import annotations

from enum import Enum

import pyarrow as pa
import pyarrow.compute as pc


class Notation(Enum):
    """A notation for a column's values."""

    BOOL = "bool"
    INT = "int"
    FLOAT_BARE = "float, whole numbers without a point"
    FLOAT_POINT = "float, whole numbers with .0"
    DATE = "date"
    TIMESTAMP = "timestamp"


Notations = frozenset[Notation]

ALL_NOTATIONS: Notations = frozenset(Notation)
"""The types of a column without values: any; a column with values never has all of them."""

_TYPES = {
    Notation.BOOL: pa.bool_(),
    Notation.INT: pa.int64(),
    Notation.FLOAT_BARE: pa.float64(),
    Notation.FLOAT_POINT: pa.float64(),
    Notation.DATE: pa.date32(),
    Notation.TIMESTAMP: pa.timestamp("s"),
}
"""In order of preference."""

_SHAPES = {
    Notation.INT: r"^(0|-?[1-9][0-9]{0,18})$",
    Notation.FLOAT_BARE: r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?$",
    Notation.DATE: r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    Notation.TIMESTAMP: r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}$",
}

_BY_ARROW = frozenset({Notation.INT, Notation.DATE, Notation.TIMESTAMP})
"""Notations in which Arrow prints values."""

_LONGEST = 32
"""Most characters in a number or a date."""

_FIRST = 64
"""Number of values that are checked first: most columns are text, and the first values show it."""


def notations_of(values: pa.Array, candidates: Notations = ALL_NOTATIONS) -> Notations:
    """Return the `candidates` that all values follow; values are text, and nulls are skipped."""
    values = values.drop_null()
    if not len(values) or not candidates:
        return candidates
    if len(values) > _FIRST:
        candidates = notations_of(values.slice(0, _FIRST), candidates)
        if not candidates:
            return candidates
    if pc.max(pc.binary_length(values)).as_py() > _LONGEST:
        return frozenset()
    found: set[Notation] = {notation for notation in candidates & _BY_ARROW if _comes_back(values, notation)}
    if Notation.BOOL in candidates and pc.all(pc.is_in(values, pa.array(["true", "false"]))).as_py():
        found.add(Notation.BOOL)
    if candidates & {Notation.FLOAT_BARE, Notation.FLOAT_POINT}:
        found |= _float_notations(values) & candidates
    return frozenset(found)


def type_of(notations: Notations) -> pa.DataType:
    """The type that a column of these notations is read as."""
    if notations == ALL_NOTATIONS:
        return pa.null()
    return next((kind for notation, kind in _TYPES.items() if notation in notations), pa.string())


def fits(notations: Notations, kind: pa.DataType) -> bool:
    """Whether a column of these notations can be read as `kind`, its type in another file."""
    if notations == ALL_NOTATIONS or pa.types.is_null(kind):
        return True
    if pa.types.is_integer(kind):
        return bool(notations & {Notation.INT, Notation.FLOAT_BARE})
    if pa.types.is_floating(kind):
        return bool(notations & {Notation.FLOAT_BARE, Notation.FLOAT_POINT})
    return bool(type_of(notations).id == kind.id)


def _comes_back(values: pa.Array, notation: Notation) -> bool:
    """Whether values are printed unchanged after they are read as the notation's type."""
    if not pc.all(pc.match_substring_regex(values, _SHAPES[notation])).as_py():
        return False
    try:
        printed = values.cast(_TYPES[notation]).cast(values.type)
    except pa.ArrowInvalid:  # for example, more than 64 bits, or the 30th of February
        return False
    return bool(printed.equals(values))


def _float_notations(values: pa.Array) -> set[Notation]:
    """Return the float notations of values: as Python prints them, whole numbers with or without ``.0``."""
    if not pc.all(pc.match_substring_regex(values, _SHAPES[Notation.FLOAT_BARE])).as_py():
        return set()
    numbers = values.cast(pa.float64())
    size = pc.abs(numbers)
    usual = pc.or_(pc.equal(size, 0), pc.and_(pc.greater_equal(size, 1e-4), pc.less(size, 1e15)))
    found = _float_notations_as_printed(values.filter(usual), numbers.filter(usual).cast(values.type))
    unusual = pc.invert(usual)
    texts, others = values.filter(unusual), numbers.filter(unusual)
    if len(texts):  # Arrow prints these differently from most programs
        printed = pa.array([repr(number).removesuffix(".0") for number in others.to_pylist()], values.type)
        found &= _float_notations_as_printed(texts, printed)
    return found


def _float_notations_as_printed(texts: pa.Array, printed: pa.Array) -> set[Notation]:
    """Return the float notations of `texts`; `printed` are their numbers without ``.0`` at the end."""
    whole = pc.invert(pc.match_substring_regex(printed, r"[.en]"))
    with_point = pc.if_else(whole, pc.binary_join_element_wise(printed, ".0", ""), printed)
    return {
        notation
        for notation, wanted in ((Notation.FLOAT_BARE, printed), (Notation.FLOAT_POINT, with_point))
        if texts.equals(wanted)
    }
