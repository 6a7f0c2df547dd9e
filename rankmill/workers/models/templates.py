"""Limits what a chat template may do, because a template may come from anywhere.

Jinja's sandbox protects the process from a template, but lets it run forever, fill the memory, and write text
that differs between days or processes. In rankmill a copy of transformers' own environment renders all
prompts, and counts what a template does for each prompt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from threading import local
from typing import Any, NoReturn

from jinja2 import Environment, Template, Undefined, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rankmill.jobs.contract.errors import SpecError

_DAY = "26 Jul 2024"
"""The date that templates get instead of today's, because a score must not change overnight."""

_LONGEST = 1 << 18
"""A chat template with more characters than this is refused."""

_MOST = 1 << 28
"""A chat template may make at most this many characters and items of lists for one prompt."""

_STEP = 1024
"""Each step of a loop, each call and each item of a list counts as this many characters of `_MOST`."""

_TIMES, _BESIDE = 4, 1 << 14
"""A prompt may have 4 times as many characters as its messages, and 16,384 more."""

_FIRST_SECONDS, _PROMPT_SECONDS = 10.0, 0.02
"""CPU time in seconds that a template may take for all its prompts: the first number, plus the second for
each prompt.
"""

_LOOK = 64
"""The CPU time that a chat template takes is checked at every 64th step."""

_DEPTH = 100

_ITERATE = frozenset({
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "join", "last",
    "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "slice", "sort", "sum", "unique",
})  # fmt: skip
"""Filters and methods that may get arguments of any type, such as an iterator. The sizes of these arguments
are not checked, except for the filters in `_ADD_UP`.
"""

_ADD_UP = frozenset({"join", "sum"})
"""Filters that put all items of a list into the result, so that the items' sizes are added up."""

_WIDEN = frozenset({
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "wordwrap",
    "zfill",
})  # fmt: skip
"""Filters and methods that get a number and return longer results for larger numbers: ``"a".zfill(9)`` has 9
characters.
"""

_MULTIPLY = frozenset({"expandtabs", "indent", "join", "replace", "tojson", "translate", "wordwrap"})
"""Filters and methods that may return a text as long as the product of the sizes of two arguments."""

_DIGITS = 300
"""A chat template that rounds a number to more digits than this is refused."""

_WIDTH = re.compile(r"%[^%a-zA-Z]*(\d{6,}|\*)|\{[^{}]*:[^{}]*(\d{6,}|\{)")
"""Matches a large or computed width in a format string, such as ``%9999999d`` or ``%*d``."""


class _Meter(local):
    """Counts what a chat template does for one prompt in this thread, and stops it at the limit."""

    left = _MOST
    until = float("inf")
    calls = 0

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TemplateError("the template takes too many steps for a prompt, or makes too much text")
        self.calls += 1
        if self.calls % _LOOK == 0 and time.thread_time() > self.until:
            raise SpecError(_TOO_LONG)


_TOO_LONG = (
    f"the chat template takes too long: more than {_FIRST_SECONDS:g} s of CPU time, and "
    f"{_PROMPT_SECONDS:g} s for each prompt"
)


class _Counted(NodeTransformer):
    """Changes templates so that `BoundedEnvironment` also counts steps of loops and macros, and joined or cut
    values.
    """

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        text = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("step", nodes.Const(text))).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", nodes.List(node.nodes))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("cut", node.node, *ends)


def _call(method: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Expr:
    """Make template code that calls a method of `BoundedEnvironment`.

    The method is a filter whose name no template can write.
    """
    return nodes.Filter(first, f"bounded {method}", list(others), [], None, None)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment that limits the time and the text of a template for each prompt.

    Raises
    ------
    TemplateError
        A template exceeds a bound, or writes text that differs each time.
    SpecError
        A template's prompts together take too long.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    _meter = _Meter()

    @classmethod
    def like(cls, environment: Environment) -> BoundedEnvironment:
        """Make a bounded environment from another one, without random text and without today's date."""
        bounded: Any = environment.overlay()
        bounded.__class__ = cls
        bounded.finalize, bounded.template_class = bounded.written, BoundedTemplate
        bounded.filters = {name: bounded._bounded(name, apply) for name, apply in bounded.filters.items()}
        own = {"step": bounded.step, "joined": bounded.joined, "cut": bounded.cut}
        bounded.filters |= {f"bounded {name}": method for name, method in own.items()}
        bounded.globals = {**bounded.globals, "strftime_now": _today}
        bounded.globals.pop("lipsum", None)  # lipsum writes random text, and so does the filter `random`
        bounded.filters.pop("random", None)
        return bounded  # type: ignore[no-any-return]

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Counted().visit(source), name, filename, defer_init)

    @pass_context
    def step(self, context: Context, text: int) -> None:
        """Count a step of a loop or macro. `text` is the number of constant characters in the body."""
        self._meter.spend(_STEP + text)

    @pass_context
    def joined(self, context: Context, parts: list[Any]) -> str:
        """Join values as the operator ``~`` does, and count the result."""
        self._meter.spend(sum(map(_size, parts)))
        return str_join(parts)

    @pass_context
    def cut(self, context: Context, value: Any, *ends: int | None) -> Any:
        """Cut a value as ``[start:stop:step]`` does, and count the result."""
        return self._counted(value[slice(*ends)])

    def written(self, value: Any) -> Any:
        self._meter.spend(_size(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "*":
            size = _times(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            # computing a power takes longer than its number of digits suggests
            size = _digits(left) * min(abs(right), _MOST) ** 2
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            size = _size(left) + _size(right)
        elif operator == "+" and isinstance(left, str | list | tuple):
            size = len(left) + (len(right) if isinstance(right, str | list | tuple) else 0)
        self._meter.spend(size)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            named = [value for name, value in kwargs.items() if not name.startswith("_")]
            __self._check(method.__name__, (text, *args, *named))
        return __self._counted(super().call(__context, __obj, *args, **kwargs))

    def _bounded(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(apply)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if hasattr(apply, "jinja_pass_arg") else args
            self._check(name, (*given, *kwargs.values()))
            return self._counted(apply(*args, **kwargs))

        return bounded

    def _check(self, name: str, given: tuple[Any, ...]) -> None:
        """Check the arguments of a filter or method before the call, because the result may be huge."""
        if name in {"format", "format_map"} and isinstance(given[0], str):
            _check_widths(given[0])
        sizes = [1, 1]
        if name not in _ITERATE:
            sizes += map(_size, given)
        elif name in _ADD_UP:
            sizes += [_size(value) for value in given if isinstance(value, str | list | tuple | dict)]
        if name in _WIDEN:
            sizes += [abs(value) for value in given if isinstance(value, int)]
        *_, second, largest = sorted(sizes)
        most = second * largest if name in _MULTIPLY else sum(sizes)
        if most > _MOST or (name == "round" and largest > _DIGITS):
            raise TemplateError(f"the template makes too much with {name}")

    def _counted(self, value: Any) -> Any:
        self._meter.spend(_STEP + (len(value) if isinstance(value, str | list | tuple | dict) else 0))
        return value


class BoundedTemplate(Template):
    """A template that limits the CPU time of its prompts.

    ``over`` is the CPU time of all prompts so far, less `_PROMPT_SECONDS` for each. After an error about the
    time it begins at 0 again, because the next prompts may be those of another run.
    """

    over = 0.0

    def render(self, *args: Any, **kwargs: Any) -> str:
        meter, began = BoundedEnvironment._meter, time.thread_time()
        meter.left, meter.until = _MOST, began + _PROMPT_SECONDS + _FIRST_SECONDS - self.over
        try:
            prompt = super().render(*args, **kwargs)
            if len(prompt) > (most := _TIMES * _size(kwargs.get("messages")) + _BESIDE):
                raise TemplateError(f"the template makes a prompt of more than {most:,} characters")
            return prompt
        finally:
            meter.left, meter.until = _MOST, float("inf")
            self.over += time.thread_time() - began - _PROMPT_SECONDS
            if self.over >= _FIRST_SECONDS:
                self.over = 0.0
                raise SpecError(_TOO_LONG)


def bound_templates() -> None:
    """Let transformers render all chat templates of this process in a `BoundedEnvironment`."""
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = _compiled


@lru_cache
def _compiled(template: str) -> Template:
    from transformers.utils import chat_template_utils

    if len(template) > _LONGEST:
        raise SpecError(f"the chat template has more than {_LONGEST:,} characters")
    own = chat_template_utils._cached_compile_jinja_template("").environment
    return BoundedEnvironment.like(own).from_string(template)


def template_options(template: str) -> dict[str, str]:
    """Return a fixed date as a variable for a chat template that would otherwise ask for today's date."""
    return {"date_string": _DAY} if "strftime_now" in template else {}


def _today(_: str) -> NoReturn:
    raise TemplateError("it writes today's date, so scores would change overnight: give it date_string")


def _size(value: Any, depth: int = 0) -> int:
    """Return about how many characters a value has as text, plus `_STEP` for each item of a list.

    Raises `TemplateError` if the text differs each time, is too long or is too deeply nested.
    """
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, float | Undefined):
        return 1
    if isinstance(value, int):
        return _digits(value)
    if not isinstance(value, list | tuple | dict):
        raise TemplateError(f"the template writes a {type(value).__name__}, whose text differs each time")
    if depth > _DEPTH:
        raise TemplateError("the template nests lists too deeply")
    size = 2
    for item in value.items() if isinstance(value, Mapping) else value:
        size += _STEP + _size(item, depth + 1)
        if size > _MOST:
            raise TemplateError("the template makes too much text of a list")
    return size


def _digits(value: int) -> int:
    return value.bit_length() // 3 + 1


def _times(left: Any, right: Any) -> int:
    """Return the size of ``left * right``: digits of a number, or elements of a text or list, such as
    ``"ab" * 3``.
    """
    if isinstance(left, int) and isinstance(right, int):
        return _digits(left) + _digits(right)
    sizes = [len(value) if isinstance(value, str | list | tuple) else abs(value) for value in (left, right)]
    return int(min(sizes[0] * sizes[1], 2 * _MOST))


def _check_widths(text: str) -> None:
    if _WIDTH.search(text):
        raise TemplateError("the template writes text of a large or computed width")
