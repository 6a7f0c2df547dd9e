"""What a chat template may do: neither for ever, nor with all memory, nor anything that differs each time."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from transformers.utils import chat_template_utils

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.home import shipped
from rankmill.jobs.contract.prompts import shipped_templates
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models import templates
from rankmill.workers.models.conversations import exchange
from rankmill.workers.models.loading import load_model
from tests.harness.models.rerankers import make_decoder

pytestmark = pytest.mark.own_precision

MESSAGES = [
    {"role": "query", "content": "how far is the moon " * 20},
    {"role": "document", "content": "384,000 km: far " * 30},
]
HEAVY = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def twice(what: str) -> str:
    """A template that doubles a text sixty times."""
    return "{% set ns = namespace(x='x') %}{% for a in range(60) %}" + what + "{% endfor %}{{ ns.x|length }}"


WITHOUT_END = {
    "loops": HEAVY,
    "loops over texts": "{% for a in messages[0].content * 9999 %}{% for b in messages[0].content %}"
    "{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(999) %}" + 1000 * "x" + "{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 40 + "x" + "{% endcall %}" * 40,
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a product": "{{ 'x' * 10000000000 }}",
    "a list": "{{ (['x'] * 10000000000)|length }}",
    "a sum": twice("{% set ns.x = ns.x + ns.x %}"),
    "joined": twice("{% set ns.x = ns.x ~ ns.x %}"),
    "blocks": twice("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "replaced": twice("{% set ns.x = ns.x.replace('x', 'xx') %}"),
    "formatted": twice("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "formatted too": twice("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "filtered": twice("{% set ns.x = [ns.x, ns.x]|join %}"),
    "nested": twice("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
    "as JSON": twice("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x|tojson }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "another width": "{{ '{:>10000000000}'.format(1) }}",
    "a computed width": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "centered": "{{ 'x'|center(10000000000) }}",
    "justified": "{{ 'x'.ljust(10000000000) }}",
    "indented": "{{ ('\n' * 1000000)|indent(1000000) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "batches": "{{ [1]|batch(10000000000, 'x')|list|length }}",
    "powers": "{{ (2 ** 100000) ** 100000 }}",
    "rounded": "{{ 1.5|round(1000000000, 'ceil') }}",
    "one item many times": "{{ ''.join(['x' * 1000000] * 1000000)|length }}",
    "lists of lists": "{{ ([range(99999)|list] * 99999)|sum(start=[])|length }}",
    "slices": "{% set x = 'x' * 9999999 %}{% set ns = namespace(x=[]) %}{% for a in range(9999) %}"
    "{% set ns.x = ns.x + [x[a:]] %}{% endfor %}",
    "its own length": "{{ messages }}" * 99_999,
    "depth": "{% if x %}" * 3000 + "{% endif %}" * 3000,
}  # fmt: skip


def compiled(template: str) -> Any:
    templates.bound_templates()
    return chat_template_utils._compile_jinja_template(template)


@pytest.mark.parametrize("what", WITHOUT_END)
def test_a_template_without_end_ends(what: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Exception, match=r"template|recursion"):
        compiled(WITHOUT_END[what]).render(messages=MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


DIFFERENT = {
    "today": "{{ strftime_now('%d %b %Y') }}",
    "today beside its string": "{{ date_string }} {{ strftime_now('%H:%M') }}",
    "chance": "{{ [1, 2, 3]|random }}",
    "chance in a filter": "{{ [[1, 2, 3]]|map('random')|list }}",
    "words by chance": "{{ lipsum() }}",
    "an address": "{{ messages|map(attribute='role') }}",
    "an address as text": "{{ messages|map(attribute='role')|string }}",
    "an address in upper case": "{{ messages|selectattr('role')|upper }}",
    "a joined address": "{{ 'a' ~ messages|map(attribute='role') }}",
    "a formatted address": "{{ '%s' % (messages|map(attribute='role')) }}",
    "an address in a list": "{{ [messages|map(attribute='role')]|join }}",
    "a method": "{{ 'a'.upper }}",
    "a function": "{{ raise_exception }}",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_template_writes_nothing_that_differs_each_time(what: str) -> None:
    with pytest.raises(Exception, match=r"differs each time|today's date|random|lipsum"):
        compiled(DIFFERENT[what]).render(messages=MESSAGES, date_string="26 Jul 2024")


ALL = (
    "{% macro tag(x) -%}<{{ x }}>{%- endmacro %}{% set ns = namespace(n=0, last='') %}"
    "{%- for m in messages %}{{ tag(m.role) }}{{ m.content | trim }}{{ '\\n' ~ loop.index ~ loop.last }}"
    "{% set ns.n = ns.n + 1 %}{% if loop.first %}{% continue %}{% endif %}{% set ns.last = m['content'] %}"
    "{% endfor %}{{ ns.n }}{{ ns.last[::-1][:5] }}{{ messages[1:]|length }}{{ messages[-1].content[3:9] }}"
    "{{ messages|tojson(indent=2) }}{{ '%s-%05d' % ('a', 3) }}{{ '{}: {:>5}'.format('x', 2) }}"
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|map(attribute='content')|map('length')|sum }}"
    "{{ messages|selectattr('role', 'equalto', 'query')|list }}{{ missing }}{{ missing is defined }}"
    "{% set text %}{{ 2 * 3 }}{{ '=' * 8 }}{% endset %}{{ text }}{{ 2.25|round(1) }}{{ [1, 2]|sum }}"
    "{{ 'a b c'.split(' ')[1] }}{{ 'abc'.replace('b', '') }}{{ 'a,b'|replace(',', ';')|upper }}{{ none }}"
    "{{ {'a': [1.5, true]} }}{{ ', '.join(['x', 'y']) }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 'x' in 'xyz' }}"
    "{% filter indent(2) %}a\nb{% endfilter %}{{ range(3)|list }}{{ dict(a=1) }}{{ 1700000000 }}"
    "{% if strftime_now is defined %}{{ date_string }}{% endif %}{{ 'Name: {} ({})'.format('a', 5) }}"
)


@pytest.mark.parametrize("template", [ALL, *shipped_templates()], ids=lambda each: each[:10])
def test_other_templates_write_what_they_write_in_transformers(template: str) -> None:
    if template is not ALL:
        template = shipped("configs", "prompts", f"{template}.jinja").read_text()
    given: dict[str, Any] = {"messages": MESSAGES, "date_string": "26 Jul 2024", "tools": None}
    own: Template = chat_template_utils._cached_compile_jinja_template(template)
    assert compiled(template).render(**given) == own.render(**given)


def test_a_long_conversation_is_no_work_without_end() -> None:
    chat = [message for turn in range(1000) for message in exchange(f"why {turn}", "the moon " * 100)]
    assert len(compiled(ALL).render(messages=chat, date_string="")) > 1_500_000


def test_a_prompt_cannot_be_many_times_as_long_as_its_texts() -> None:
    with pytest.raises(Exception, match="makes a prompt of more than"):
        compiled("{{ 'x' * 100000 }}{{ messages[0].content }}").render(messages=MESSAGES)
    long = [{"role": "query", "content": "the moon " * 100_000}]
    assert len(compiled("{{ messages[0].content * 2 }}").render(messages=long)) == 1_800_000


def scored(tmp_path: Path, template: str, rows: int = 40) -> Any:
    model = make_decoder(tmp_path / "model", "qwen3", task="classifier", template=template)
    spec = ScoreSpec(model=str(model), precision="fp32", inputs="conversations")
    chats = [exchange("why", f"the moon {row}" if row != 3 else "a river") for row in range(rows)]
    return Engine(load_model(spec, "cpu", "torch", str(tmp_path / "cache")), 512).score(
        [json.dumps(chat) for chat in chats]
    )


MOSTLY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if WORD in m.content %}HEAVY{% endif %}"
    "{% endfor %}"
)


def test_a_row_whose_prompt_has_no_end_is_that_rows_error(tmp_path: Path) -> None:
    found = scored(tmp_path, MOSTLY.replace("WORD", "'river'").replace("HEAVY", HEAVY))
    assert list(found.errors) == [3]
    assert "too many steps" in found.errors[3]


def test_a_model_whose_prompts_take_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_FIRST_SECONDS", 0.5)
    with pytest.raises(SpecError, match="the chat template takes too long"):
        scored(tmp_path, MOSTLY.replace("WORD", "'moon'").replace("HEAVY", HEAVY))


def test_prompts_that_take_too_long_end_no_later_run_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_FIRST_SECONDS", 0.02)
    monkeypatch.setattr(templates, "_PROMPT_SECONDS", 0.0)
    template = compiled("{% for m in messages %}{{ m.content|upper }}{% endfor %}")
    long = [{"role": "query", "content": "x" * 200_000_000}]
    with pytest.raises(SpecError, match="the chat template takes too long"):
        template.render(messages=long)
    assert template.render(messages=MESSAGES) == "".join(each["content"].upper() for each in MESSAGES)


def test_pairs_with_a_date_have_the_scores_of_each_day(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%d %b %Y') if date_string is not defined else date_string }}"
    texts = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# query document #}"
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=dated + texts)
    spec = ScoreSpec(model=str(model), precision="fp32")
    tokenizer: Any = load_model(spec, "cpu", "torch", str(tmp_path / "cache")).tokenizer
    (prompt,) = tokenizer.rendered(["moon"], ["river"])
    assert prompt.startswith("26 Jul 2024<query>")
    other = spec.model_copy(update={"prompt_template": "{{ strftime_now('%Y') }}" + texts})
    with pytest.raises(SpecError, match="writes today's date"):
        load_model(other, "cpu", "torch", str(tmp_path / "cache"))
