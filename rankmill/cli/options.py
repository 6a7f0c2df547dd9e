"""Declares the options that commands share, and makes options from the fields of a pydantic model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo

from rankmill.cli.common import CONTEXT
from rankmill.cli.exits import OneKindOfLine, clean_exit
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.home import expanded
from rankmill.jobs.runtime.installation import require_packages
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import Settings, extension_settings, load_settings, merge_settings
from rankmill.producer.files.stores.paths import AnyPath, as_path, is_url

if TYPE_CHECKING:
    import redis

_WAIT_SECONDS = 5

Function = Callable[..., None]
Option = Callable[[Function], Function]

REDIS_OR_EMBEDDED = "REDIS_URL, else an embedded server and workers"

HELP = {
    "model": "Hub id, local directory, NAME@VERSION or NAME@ALIAS in the registry, or 'demo'.",
    "revision": "Branch, tag or commit on the hub.",
    "precision": "Number format the model computes in; auto: the best for the worker's hardware.",
    "max_length": "Most tokens in a pair; --long says what happens to longer ones.",
    "activation": "Function from the model's output to the score; default: the model's own.",
    "instruction": "Instruction for the model, in its prompt or before each query.",
    "prompt_template": "Jinja file, or the name of a shipped template; none: only the two texts.",
    "label": "Name or number of the output to use as score.",
    "all_labels": "Write a column for each output of the model.",
    "deterministic": "Give equal pairs the same bits, in any order, in all chunks and on all workers.",
    "long": "Passages over the limit: cut, score overlapping windows (the best or their mean), or refuse.",
    "truncation_side": "Where to cut texts over the limit: right (the end) or left.",
    "max_passage_tokens": "Most tokens of a passage.",
    "long_stride": "Tokens from the start of a window to the start of the next.",
    "redis_url": "redis://, rediss:// (TLS), unix:// or redis+sentinel:// URL of the server.",
    "queue": "Name of the queue.",
    "tenant": "Owner of the run; waiting tenants get equal numbers of pairs.",
    "weight": "Share of the tenant; weight 2 gets twice the pairs of weight 1.",
    "chunk_size": "Most pairs in a job; auto: about a second's work of the slowest device, 16 to 16,384.",
    "workers": "Worker processes on this host; auto: 1 for each GPU, up to 4 if it waits for them; else 1.",
    "threads": f"CPU threads of each worker; auto: its share of the cores ({cores()} here).",
    "device": "Device on which workers of this host run the model; auto: cuda, else mps, else cpu.",
    "backend": "Library that runs the model: openvino, torch, onnx, mlx, or one that a package adds; auto: "
    "on a CPU the fastest installed, as measured; else torch.",
    "warm": "Models to load at the start, separated by commas.",
    "log_level": "Least severe messages to show; debug: also lines for each chunk.",
    "exporter_address": "HOST or HOST:PORT to listen on.",
    "exporter_hosts": "Host names to answer to, separated by commas, besides localhost and IP addresses.",
}
_NONE = {
    "revision": "the hub's default branch",
    "max_length": "the model's limit",
    "instruction": "the model's own",
    "prompt_template": "the model's own",
    "label": "the only one",
    "long_stride": "half of a window",
    "truncation_side": "as the model's tokenizer does",
    "max_passage_tokens": "the model's limit",
    "redis_url": "REDIS_URL",
    "warm": "none",
    "tenant": "none",
    "exporter_hosts": "none",
}
"""The default that --help shows for settings whose default is `None` or empty."""

_SHOWN = {"precision": "auto|fp32|bf16|int8…"}
"""What --help shows in place of a setting's values if there are too many for a line. The reference of
settings lists them all.
"""

DEFAULTS = {name: setting.value for name, setting in merge_settings(environ={}).items()}


class _Grouped(OneKindOfLine):
    groups: Mapping[str, str] = {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        order = [name for names in self.groups.values() for name in names.split()]
        places = {name: place for place, name in enumerate(order)}
        return sorted(super().get_params(ctx), key=lambda option: places.get(option.name or "", len(order)))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        of = {name: title for title, names in self.groups.items() for name in names.split()}
        rest = "Other options" if self.groups else "Options"
        by_title: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if record := option.get_help_record(ctx):
                by_title.setdefault(of.get(option.name or "", rest), []).append(record)
        for title, records in by_title.items():
            with formatter.section(title):
                formatter.write_dl(records)


def command(
    name: str, *, epilog: str | None = None, interrupted: str = "", groups: Mapping[str, str] | None = None
) -> Callable[[Function], click.Command]:
    """Make a `click.command` that also has ``-h``, and that reports a failure in one line (`clean_exit`).

    `groups` sorts the options in ``--help`` under titles: ``{"Input": "columns delimiter"}``. Other options
    come last.
    """

    def wrap(function: Function) -> click.Command:
        make = click.command(name, cls=_Grouped, epilog=epilog, context_settings=CONTEXT)
        made = make(clean_exit(interrupted)(function))
        made.groups = groups or {}
        return made

    return wrap


def group(name: str) -> Callable[[Function], click.Group]:
    """Make a `click.group` that also runs without a subcommand, and reports a failure in one line.

    Without a subcommand, the group's function gets a connection to the server. A subcommand gets the group's
    ``--redis`` and ``--config`` as defaults.
    """

    def wrap(function: Function) -> click.Group:
        @click.pass_context
        @functools.wraps(function)
        def run(context: click.Context, /, redis_url: str | None, config: str | None, **given: Any) -> None:
            if command := context.invoked_subcommand:
                for option in context.command.params:
                    if given.get(option.name or ""):
                        raise click.UsageError(f"{option.opts[0]} has no effect before {command}")
                context.default_map = {command: {"redis_url": redis_url, "config": config}}
            else:
                function(connection(load_settings({"redis_url": redis_url}, config)), **given)

        make = click.group(name, invoke_without_command=True, context_settings=CONTEXT)
        return make(clean_exit()(flags("redis_url")(run)))

    return wrap


def settings(
    *names: str, prefix: str = "", logs: bool = False, others: tuple[str, ...] = (), **defaults: str
) -> Option:
    """Load the settings for a command, and pass them to the command's function as ``settings``.

    Parameters
    ----------
    names, defaults
        Names of the settings that options of the command override; `flags` adds these options.
    prefix
        As in `flags`.
    logs
        Whether the command logs; its options ``quiet`` and ``verbose``, if it has them, set how much.
    others
        Names of settings that other options or arguments of the command set.
    """
    taken = (*names, *defaults, *others)

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, config: str | None, **given: Any) -> None:
            values = {name: given.pop(name, None) for name in taken}
            if given.pop("verbose", False):
                values["log_level"] = "debug"
            if logs and given.get("quiet"):
                values["log_level"] = "error"
            loaded = load_settings(values, config)
            if logs:
                set_up(loaded.log_level, loaded.log_format)
            function(*args, settings=loaded, **given)

        return flags(*names, prefix=prefix, **defaults)(run)

    return wrap


def flags(*names: str, prefix: str = "", **defaults: str) -> Option:
    """Add ``--config``, and for each setting in `names` and `defaults` a flag that overrides it.

    `defaults` has the text that ``--help`` shows as the default of a setting, such as
    ``redis_url="REDIS_URL"``. Flags are named like their settings, without `prefix`: with the prefix
    ``runner_``, the setting ``runner_read`` gets the flag ``--read``. A setting of an extension that is not
    installed gets no flag.
    """

    def wrap(function: Function) -> Function:
        function = click.option(
            "--config", metavar="FILE", help="YAML file of settings.  [default: RANKMILL_CONFIG]"
        )(function)
        for name in reversed([*names, *defaults]):
            if field := _field(name):
                flag = "redis" if name == "redis_url" else name.removeprefix(prefix)
                function = _setting(name, f"--{flag.replace('_', '-')}", field, defaults.get(name))(function)
        return function

    return wrap


def _field(name: str) -> FieldInfo | None:
    if name in Settings.model_fields:
        return Settings.model_fields[name]
    added = extension_settings()
    return added[name].model_fields[name] if name in added else None


def _setting(name: str, flag: str, field: FieldInfo, default: str | None) -> Option:
    kind, text = field.annotation, field.description or HELP[name]
    if kind is bool:
        shown = f"{text}  [default: {DEFAULTS[name]}]"
        return click.option(flag, name, is_flag=True, default=None, help=shown)
    words, takes_number = _values(kind)
    default = default or _NONE.get(name) or str(DEFAULTS[name] or f"RANKMILL_{name.upper()}")
    return click.option(
        flag,
        name,
        metavar=_SHOWN.get(name) or "|".join([*words, *(["N"] if takes_number else [])]) or "TEXT",
        help=f"{text}  [default: {default}]",
        shell_complete=lambda context, option, begun: [word for word in words if word.startswith(begun)],
    )


def _values(annotation: Any) -> tuple[list[str], bool]:
    """Return the words that a setting accepts, and whether the setting accepts a number."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)], False
    parts = [_values(part) for part in get_args(annotation)]
    words = [word for some, _ in parts for word in some]
    return words, annotation is int or any(number for _, number in parts)


Column = Annotated[str, Field(title="NAME")]
File = Annotated[str, Field(title="FILE")]
StoredPath = Annotated[
    AnyPath,
    PlainValidator(lambda path: path),
    WithJsonSchema({"type": "string", "format": "stored-path", "title": "FILE"}),
]
Number = Annotated[int, Field(ge=1, title="N")]
"""A whole number of at least 1, which ``--help`` shows as N."""


class CommandOptions(BaseModel):
    """Base class of a command's own options. Each field is an option; the text below it is the help."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, use_attribute_docstrings=True)


class SampleOptions(CommandOptions):
    """Options of a command that scores a sample of the pairs in files."""

    label_column: Column | None = None
    """Column with the relevance as a number; with it, the report has nDCG@10."""
    sample: Annotated[int, Field(ge=2)] = 2000
    """Number of random rows to score; at most 50 of each query, if there are enough queries."""
    query_column: Column = "query"
    """Column with the query."""
    passage_column: Column = "passage"
    """Column with the passage."""


class NewTable(CommandOptions):
    """Options of a command that writes rows into a new file."""

    output: StoredPath
    """File to write (.parquet, .arrow, .feather, .csv, .tsv or .jsonl), or - for standard output."""
    output_format: Column | None = None
    """Format of the output.  [default: by the output's name; for standard output, the format of the input]"""


def of(model: type[CommandOptions], called: str = "asked") -> Option:
    """Add an option for each field of `model`. The command's function gets their values as an object of
    `model`, in the argument named by `called`.
    """
    named = made_of(model)

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **given: Any) -> None:
            asked = model(**{name: given.pop(name) for name in named})
            function(*args, **{called: asked}, **given)

        made: Function = run
        for option in reversed(named.values()):
            made = option(made)
        return made

    return wrap


def made_of(model: type[BaseModel]) -> dict[str, Option]:
    """Make an option for each field of a pydantic `model`; the field gives its type, default and help.
    Returns the options by the names of the fields.

    ``--help`` shows ``--sample N`` if the title of the field's type is ``N``.
    """
    schema = model.model_json_schema(by_alias=False)["properties"]
    return {name: _option(name, schema[name], field) for name, field in model.model_fields.items()}


def _option(name: str, schema: dict[str, Any], field: FieldInfo) -> Option:
    kind = schema.get("anyOf", [schema])[0]  # if a field may be None, its other type comes first
    title, kind_name = kind.get("title"), kind["type"]
    own: dict[str, Any] = {"metavar": None if title == name.replace("_", " ").title() else title}
    least, most = kind.get("minimum", kind.get("exclusiveMinimum")), kind.get("maximum")
    if kind_name == "boolean":
        own = {"is_flag": True}
    elif "enum" in kind:
        own = {"type": click.Choice(kind["enum"])}
    elif kind_name == "integer":
        own["type"] = click.INT if least is None else click.IntRange(least, most)
    elif kind_name == "number":
        is_open = "exclusiveMinimum" in kind
        own["type"] = click.FLOAT if least is None else click.FloatRange(least, most, min_open=is_open)
    elif "path" in kind.get("format", ""):
        own["type"] = PATH if kind["format"] == "stored-path" else click.Path(path_type=Path)
    elif field.default == ():
        own |= {"multiple": True, "callback": _split if (title or "").endswith(",...") else None}
    else:
        own["callback"] = _check(field)
    if "multiple" not in own and not field.is_required():
        own |= {"default": field.default, "show_default": kind_name != "boolean"}
    text = " ".join(schema.get("description", "").split()).replace(" [default:", "  [default:")
    flags = (*(["-o"] if name == "output" else []), f"--{(field.alias or name).replace('_', '-')}")
    return click.option(*flags, name, help=text, required=field.is_required(), **own)


def _split(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for names in given for name in names.split(",") if name)


def _check(field: FieldInfo) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def checked(context: click.Context, option: click.Parameter, given: str | None) -> Any:
        try:
            return TypeAdapter(field.rebuild_annotation()).validate_python(given)
        except ValidationError as error:
            raise click.BadParameter(reason(error)) from None

    return checked


def reason(error: ValidationError) -> str:
    """Return the first reason why the values of a command's options are not valid."""
    if (first := error.errors()[0])["type"] == "string_unicode":  # pydantic's message does not name the text
        return f"{first['input']!r} is not valid UTF-8; give the file or the folder another name"
    return first["msg"].removeprefix("Value error, ")


def refuse_of_workers(*, embedded: bool) -> None:
    """Raise `UsageError` if a flag for embedded workers is given, but the command starts no workers
    (`embedded`). Settings from a file or the environment are not checked, because they are for all commands.
    """
    given = click.get_current_context().params
    for name in () if embedded else ("workers", "device", "backend"):
        if given.get(name) is not None:
            raise click.UsageError(
                f"--{name} is for embedded workers; with --redis (REDIS_URL) workers have their own settings"
            )


def server(settings: Settings) -> str:
    """Return the URL of the Redis server; raises `ConfigError` if the settings name none."""
    if not settings.redis_url:
        raise ConfigError("no Redis server is named: give --redis or set REDIS_URL")
    return settings.redis_url


def connection(settings: Settings) -> redis.Redis:
    """Connect to the Redis server, for a command that asks the server only once. If the server is away, wait
    at most `_WAIT_SECONDS` for it, or ``redis_wait_seconds`` if that is less.
    """
    from rankmill.jobs.runtime.connection import connect

    return connect(server(settings), min(settings.redis_wait_seconds, _WAIT_SECONDS))


class _FileOrObject(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return super().convert(value, param, ctx)
        return as_path(value) if is_url(value) else super().convert(str(expanded(value)), param, ctx)


PATH = _FileOrObject(path_type=Path)


def require_plots() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    require_packages(("matplotlib",), "lab", "drawing plots")


force = click.option("--force", is_flag=True, help="Replace an existing output.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress display; no messages except errors.")
