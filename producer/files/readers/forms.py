"""Types of untyped columns: a type is chosen only if it writes every value exactly as it was read.

Read as a number, ``007`` would be written as ``7``, so a column that contains it is text. A column's *forms*
are the notations that all of its values follow. A column in several files has the forms that are common to
all of them, so it has the same type in all of them.
"""

from __future__ import annotations

from enum import Enum

import pyarrow as pa
import pyarrow.compute as pc


class Form(Enum):
    """A notation for a column's values."""

    BOOL = "bool"
    INT = "int"
    FLOAT_BARE = "float, whole numbers without a point"
    FLOAT_POINT = "float, whole numbers with .0"
    DATE = "date"
    TIMESTAMP = "timestamp"


Forms = frozenset[Form]

ALL_FORMS: Forms = frozenset(Form)
"""Forms of a column without values, which could have any type; a column with values never has all forms."""

_TYPES = {
    Form.BOOL: pa.bool_(),
    Form.INT: pa.int64(),
    Form.FLOAT_BARE: pa.float64(),
    Form.FLOAT_POINT: pa.float64(),
    Form.DATE: pa.date32(),
    Form.TIMESTAMP: pa.timestamp("s"),
}
"""In order of preference."""

_SHAPES = {
    Form.INT: r"^(0|-?[1-9][0-9]{0,18})$",
    Form.FLOAT_BARE: r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?$",
    Form.DATE: r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    Form.TIMESTAMP: r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}$",
}

_BY_ARROW = frozenset({Form.INT, Form.DATE, Form.TIMESTAMP})
"""Forms in which Arrow prints values."""

_LONGEST = 32
"""Most characters in a number or a date."""

_FIRST = 64
"""Number of values that are checked first: most columns are text, and the first values show it."""


def forms_of(values: pa.Array, candidates: Forms = ALL_FORMS) -> Forms:
    """Return the `candidates` that all values follow; values are text, and nulls are skipped."""
    values = values.drop_null()
    if not len(values) or not candidates:
        return candidates
    if len(values) > _FIRST:
        candidates = forms_of(values.slice(0, _FIRST), candidates)
        if not candidates:
            return candidates
    if pc.max(pc.binary_length(values)).as_py() > _LONGEST:
        return frozenset()
    found: set[Form] = {form for form in candidates & _BY_ARROW if _comes_back(values, form)}
    if Form.BOOL in candidates and pc.all(pc.is_in(values, pa.array(["true", "false"]))).as_py():
        found.add(Form.BOOL)
    if candidates & {Form.FLOAT_BARE, Form.FLOAT_POINT}:
        found |= _float_forms(values) & candidates
    return frozenset(found)


def type_of(forms: Forms) -> pa.DataType:
    """The type that a column of these forms is read as."""
    if forms == ALL_FORMS:
        return pa.null()
    return next((kind for form, kind in _TYPES.items() if form in forms), pa.string())


def fits(forms: Forms, kind: pa.DataType) -> bool:
    """Whether a column of these forms can be read as `kind`, its type in another file."""
    if forms == ALL_FORMS or pa.types.is_null(kind):
        return True
    if pa.types.is_integer(kind):
        return bool(forms & {Form.INT, Form.FLOAT_BARE})
    if pa.types.is_floating(kind):
        return bool(forms & {Form.FLOAT_BARE, Form.FLOAT_POINT})
    return bool(type_of(forms).id == kind.id)


def _comes_back(values: pa.Array, form: Form) -> bool:
    """Whether values are printed unchanged after they are read as the form's type."""
    if not pc.all(pc.match_substring_regex(values, _SHAPES[form])).as_py():
        return False
    try:
        printed = values.cast(_TYPES[form]).cast(values.type)
    except pa.ArrowInvalid:  # for example, more than 64 bits, or the 30th of February
        return False
    return bool(printed.equals(values))


def _float_forms(values: pa.Array) -> set[Form]:
    """Return the float forms of values: as Python prints them, whole numbers with or without ``.0``."""
    if not pc.all(pc.match_substring_regex(values, _SHAPES[Form.FLOAT_BARE])).as_py():
        return set()
    numbers = values.cast(pa.float64())
    size = pc.abs(numbers)
    usual = pc.or_(pc.equal(size, 0), pc.and_(pc.greater_equal(size, 1e-4), pc.less(size, 1e15)))
    found = _float_forms_as_printed(values.filter(usual), numbers.filter(usual).cast(values.type))
    unusual = pc.invert(usual)
    texts, others = values.filter(unusual), numbers.filter(unusual)
    if len(texts):  # Arrow prints these differently from most programs
        printed = pa.array([repr(number).removesuffix(".0") for number in others.to_pylist()], values.type)
        found &= _float_forms_as_printed(texts, printed)
    return found


def _float_forms_as_printed(texts: pa.Array, printed: pa.Array) -> set[Form]:
    """Return the float forms of `texts`; `printed` are their numbers without ``.0`` at the end."""
    whole = pc.invert(pc.match_substring_regex(printed, r"[.en]"))
    with_point = pc.if_else(whole, pc.binary_join_element_wise(printed, ".0", ""), printed)
    return {
        form
        for form, wanted in ((Form.FLOAT_BARE, printed), (Form.FLOAT_POINT, with_point))
        if texts.equals(wanted)
    }
