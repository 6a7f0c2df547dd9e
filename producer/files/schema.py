"""One schema for all files of an input."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.wire import is_text
from rankmill.producer.files.formats.base import Survey
from rankmill.producer.files.formats.notations import (
    ALL_NOTATIONS,
    Notation,
    Notations,
    fits,
    notations_of,
    type_of,
)
from rankmill.producer.files.inputs import InputFile


def with_partition(file: InputFile, survey: Survey) -> Survey:
    """Add the columns from the names of the file's folders to the survey: integers if possible, else text.

    Raises
    ------
    InputError
        The file itself has a column of the same name.
    """
    schema, notations = survey.schema, dict(survey.notations)
    for name, text in file.partition:
        if name in schema.names:
            raise InputError(
                f"{file.path}: column {name!r} is in the file and in its folder's name, {name}={text}; "
                "rename one"
            )
        schema = schema.append(pa.field(name, pa.string()))
        known = notations_of(pa.array([text], pa.string()))
        notations[name] = known if text is None else known & {Notation.INT}
    return replace(survey, schema=schema, notations=notations)


def unify(
    files: Sequence[InputFile],
    surveys: Sequence[Survey],
    query_and_passage: Sequence[str],
    as_text: Collection[str],
) -> pa.Schema:
    """Merge the columns of all files. A column is text if its values would otherwise be written differently.

    Raises
    ------
    InputError
        A column of `as_text` is in none of the files or cannot be text, or columns of the files are
            incompatible.
    """
    unknown = set(as_text) - {name for survey in surveys for name in survey.schema.names}
    if unknown and any(survey.schema.names for survey in surveys):
        raise InputError(f"--text-columns: no column {min(unknown)!r} in the input")
    notations = _common_notations(surveys)
    texts = {*as_text, *(name for name, known in notations.items() if not _typed(name, known, surveys))}
    merged = pa.schema([])
    for file, survey in zip(files, surveys, strict=True):
        own = pa.schema([_chosen(file, field, survey, notations, texts, as_text) for field in survey.schema])
        try:
            options = "permissive" if merged.names else "default"
            merged = pa.unify_schemas([merged, own], promote_options=options)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(
                f"{file.path}: its columns do not fit those of the files before it: {error} "
                "(--text-columns NAME reads a column as text)"
            ) from None
        if survey.schema.metadata and not merged.metadata:
            merged = merged.with_metadata(survey.schema.metadata)
    return merged if merged.names else pa.schema([(name, pa.string()) for name in query_and_passage])


def to_ask_for(survey: Survey, schema: pa.Schema) -> pa.Schema:
    """Return the schema to read a file with: a number in JSON must be read as one before it becomes text."""
    fields = []
    for field in schema:
        place = survey.schema.get_field_index(field.name)
        if place >= 0 and field.name not in survey.notations and is_text(field.type):
            own = survey.schema.field(place)
            field = field if is_text(own.type) else own  # noqa: PLW2901
        fields.append(field)
    return pa.schema(fields)


def conform(batch: pa.RecordBatch, schema: pa.Schema, file: InputFile) -> pa.RecordBatch:
    """Convert the batch to `schema`; a file may lack columns or have narrower types."""
    if not file.partition and batch.schema.equals(schema):  # JSON has all columns that it is asked for
        return batch
    constant = dict(file.partition)
    columns = []
    for field in schema:
        if field.name in constant:
            column = pa.repeat(pa.scalar(constant[field.name], pa.string()), len(batch)).cast(field.type)
        elif batch.schema.get_field_index(field.name) >= 0:
            column = batch[field.name].cast(field.type)
        else:
            column = pa.nulls(len(batch), field.type)
        columns.append(column)
    return pa.record_batch(columns, schema=schema)


def _common_notations(surveys: Sequence[Survey]) -> dict[str, Notations]:
    names = {name for survey in surveys for name in survey.notations}
    return {
        name: ALL_NOTATIONS.intersection(*(survey.notations.get(name, ALL_NOTATIONS) for survey in surveys))
        for name in names
    }


def _typed(name: str, notations: Notations, surveys: Sequence[Survey]) -> bool:
    """Whether an untyped column need not be text: its notations agree, and fit its types in other files."""
    declared = [
        survey.schema.field(name).type
        for survey in surveys
        if name not in survey.notations and survey.schema.get_field_index(name) >= 0
    ]
    return bool(notations) and all(fits(notations, kind) for kind in declared)


def _chosen(
    file: InputFile,
    field: pa.Field,
    survey: Survey,
    notations: Mapping[str, Notations],
    texts: Collection[str],
    as_text: Collection[str],
) -> pa.Field:
    if field.name not in texts:
        return field.with_type(type_of(notations[field.name])) if field.name in survey.notations else field
    if is_text(field.type):
        return field.with_type(pa.string()) if pa.types.is_null(field.type) else field
    if pa.types.is_primitive(field.type) or pa.types.is_decimal(field.type):
        return field.with_type(pa.string())
    if field.name in as_text:
        raise InputError(f"--text-columns: column {field.name!r} of {file.path} holds {field.type}")
    return field
