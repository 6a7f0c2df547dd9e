"""Each family of rerankers has the scores of `CrossEncoder.predict`, whatever its batches are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.base.modules.normalize import Normalize
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer

from rankmill import Client
from rankmill.jobs.contract.errors import ConfigError, RunFailed, SpecError, WorkerError
from rankmill.jobs.contract.prompts import read_template, shipped_templates
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.families import TRACEABLE
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.probing import ids_of
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.engine.work import prepare
from rankmill.workers.models.description import load_tokenizer
from rankmill.workers.models.loading import load, load_model
from tests.conftest import Server, StartWorker
from tests.harness.models.rerankers import (
    DECODERS,
    ENCODERS,
    PAIR_TEMPLATE,
    PASS_ALL_TEMPLATE,
    make_chain,
    make_decoder,
    make_encoder,
    save_tokenizer,
)
from tests.harness.tools import slow_but
from tests.workers.engine.test_engine import some_pairs

pytestmark = pytest.mark.own_precision

QUERIES, PASSAGES = (
    [*texts, *texts[:3], *more]
    for texts, more in zip(some_pairs(16), (["", "so far", ""], ["", "", "the moon"]), strict=True)
)
"""Some rows are truncated, some are repeated, some have no text."""

BUDGETS = (1, 150, 1000)
"""Tokens in a batch: a pair, a few pairs, all pairs."""

RAW = nn.Identity()

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 2.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4, "original_max_position_embeddings": 24,
}  # fmt: skip


def expected(model: Path, *, load: dict[str, Any] | None = None, **options: Any) -> Logits:
    """One pair at a time: no padding."""
    pairs = list(zip(QUERIES, PASSAGES, strict=True))
    theirs = CrossEncoder(str(model), device="cpu", **(load or {}))
    scores: Logits = theirs.predict(pairs, batch_size=1, **options)
    return scores


def scores_of(model: Path, cache: Path, *, backend: str = "torch", **spec: Any) -> Logits:
    wanted = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **spec})
    loaded = load_model(wanted, "cpu", backend, str(cache))
    assert loaded.backend.name == backend
    scored = Engine(loaded, 300).score(QUERIES, PASSAGES)
    assert scored.errors == {}
    return scored.scores


@cache
def raw_scores(model: Path) -> dict[str | None, Logits]:
    """Those of `CrossEncoder.predict`, one pair at a time, without and with an instruction."""
    pairs, crossencoder = list(zip(QUERIES, PASSAGES, strict=True)), CrossEncoder(str(model), device="cpu")
    found = {
        prompt: crossencoder.predict(pairs, batch_size=1, activation_fn=RAW, prompt=prompt)
        for prompt in (None, "find the moon: ")
    }
    plain, instructed = found.values()
    assert min(plain.std(), instructed.std()) > 0.01
    assert np.abs(instructed - plain).max() > 1e-3
    return found


def agrees(model: Path, cache: Path, atol: float, *, backend: str = "torch") -> None:
    """Raw scores are those of `CrossEncoder.predict`, one by one and in batches, also with an instruction."""
    spec = ScoreSpec(model=str(model), precision="fp32", activation="identity")
    loaded = load(spec, "cpu", backend, str(cache))
    assert loaded.backend.name == backend
    for prompt, theirs in raw_scores(model).items():
        asked = loaded.model(spec.model_copy(update={"instruction": prompt}))
        for budget in BUDGETS:
            scored = Engine(asked, budget).score(QUERIES, PASSAGES)
            assert scored.errors == {}
            np.testing.assert_allclose(scored.scores, theirs, atol=atol, err_msg=f"{prompt} {budget}")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model of each family once, for tests that do not change it."""
    return cache(lambda name: make_encoder(tmp_path_factory.mktemp("encoder") / "model", name))


def refusal(model: Path, cache: Path, **spec: Any) -> str:
    with pytest.raises(SpecError) as caught:
        scores_of(model, cache, **spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", slow_but(ENCODERS, "bert", "xlm-roberta", "modernbert, cls", "deberta-v3"))
def test_encoders(name: str, encoder: Callable[[str], Path], tmp_path: Path) -> None:
    model = encoder(name)
    agrees(model, tmp_path, 1e-5)
    np.testing.assert_allclose(scores_of(model, tmp_path), expected(model), atol=1e-5)


@pytest.mark.parametrize("backend", ["openvino", "onnx"])
@pytest.mark.parametrize(
    "name",
    slow_but([name for name, (kind, *_) in ENCODERS.items() if kind in TRACEABLE], "bert", "modernbert, cls"),
)
def test_encoders_as_graphs(name: str, backend: str, encoder: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip({"onnx": "onnxruntime"}.get(backend, backend))
    agrees(encoder(name), tmp_path, 2e-5, backend=backend)


def head(width: int, **options: Any) -> Dense:
    return Dense(width, 1, activation_function=RAW, module_output_name="scores", **options)


def ettin(width: int) -> list[Any]:
    return [
        Pooling(width, "cls"),
        Dense(width, width, bias=False, activation_function=nn.GELU()),
        LayerNorm(width),
        head(width),
    ]


def winding(width: int) -> list[Any]:
    return [
        Pooling(width, ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]),
        Dropout(0.5),
        Dense(6 * width, width, use_residual=True),
        Dense(width, width, use_residual=True, module_output_name="other"),
        Normalize("other", "sentence_embedding"),
        head(width, bias=False),
    ]


CHAINS = {
    "as Ettin's": ("modernbert, cls", ettin),
    "mean pooling": ("bert", lambda width: [Pooling(width, "mean"), head(width)]),
    "all poolings": ("modernbert, cls", winding),
    "xlm-roberta, cls": ("xlm-roberta", ettin),
}


@pytest.mark.parametrize("name", slow_but(CHAINS, "as Ettin's", "all poolings"))
def test_module_chains(name: str, tmp_path: Path) -> None:
    agrees(make_chain(tmp_path, *CHAINS[name]), tmp_path, 1e-5)


def test_a_chain_that_changes_the_tokens_states_is_proven(tmp_path: Path) -> None:
    """It was compared with the states before the change, and refused."""
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    model = make_chain(
        tmp_path, "bert", lambda width: [Dense(width, width, **names), Pooling(width, "mean"), head(width)]
    )
    spec = ScoreSpec(model=str(model), precision="fp32")
    assert load_proven(spec, "cpu", "torch", str(tmp_path / "cache")).proof
    agrees(model, tmp_path, 1e-5)


def test_a_chain_as_a_graph(tmp_path: Path) -> None:
    agrees(make_chain(tmp_path, "bert", ettin), tmp_path, 2e-5, backend="openvino")


def test_modules_after_a_sequence_classifier_are_refused(tmp_path: Path) -> None:
    """The scores were those without these modules."""
    plain, model = make_encoder(tmp_path / "plain", "bert"), tmp_path / "model"
    body = Transformer(str(plain), transformer_task="sequence-classification")
    scale = Dense(1, 1, activation_function=RAW, module_input_name="scores", module_output_name="scores")
    CrossEncoder(modules=[body, scale], device="cpu").save_pretrained(str(model))
    assert np.abs(expected(model) - expected(plain)).max() > 1e-3
    assert "sequence-classification with Dense after it" in refusal(model, tmp_path)


def test_a_chain_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    model = make_chain(tmp_path, "bert", ettin)
    edit(model / "2_Dense" / "config.json", out_features=31)
    assert "2_Dense/model.safetensors does not fit" in refusal(model, tmp_path)
    edit(model / "2_Dense" / "config.json", out_features=32, activation_function="some.Function")
    assert "names activation some.Function" in refusal(model, tmp_path)
    (model / "2_Dense" / "model.safetensors").unlink()
    edit(model / "2_Dense" / "config.json", activation_function="torch.nn.Tanh")
    assert "has no 2_Dense/model.safetensors" in refusal(model, tmp_path)
    edit(model / "sentence_bert_config.json", query_expansion={"length": 9})
    assert "sets query_expansion in sentence_bert_config.json" in refusal(model, tmp_path)
    modules = json.loads((model / "modules.json").read_text())
    custom = {**modules[0], "type": "code.Transformer"}
    (model / "modules.json").write_text(json.dumps([custom, *modules[1:]]))
    assert "only sentence-transformers runs (code.Transformer, Pooling, " in refusal(model, tmp_path)
    (model / "modules.json").write_text(json.dumps([*modules, {**modules[-1], "type": "some.Other"}]))
    assert "has modules that only sentence-transformers runs" in refusal(model, tmp_path)


def test_a_model_that_asks_for_other_versions_is_left_to_others(tmp_path: Path) -> None:
    model = make_chain(tmp_path, "bert", ettin)
    about = model / "config_sentence_transformers.json"
    edit(about, requirements={"transformers": ">=5", "sentence-transformers": ">=99", "torch": ">=2,<9"})
    scores_of(model, tmp_path)
    edit(about, requirements={"transformers": {"specifier": ">=99", "reason": "it scores otherwise"}})
    with pytest.raises(WorkerError, match="asks for transformers >=99, and this worker has "):
        scores_of(model, tmp_path)


def edit(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


LABELS = {"id2label": {0: "contradiction", 1: "entailment", 2: "neutral"}}


def test_several_outputs(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "roberta", 3, **LABELS)
    raw, shares = expected(model), expected(model, apply_softmax=True)
    for label in ("entailment", "Entailment", "1"):
        np.testing.assert_allclose(scores_of(model, tmp_path, label=label), raw[:, 1], atol=1e-5)
    ours = scores_of(model, tmp_path, label="neutral", activation="softmax")
    np.testing.assert_allclose(ours, shares[:, 2], atol=1e-5)
    bits = scores_of(model, tmp_path, label="neutral", precision="bf16")
    assert 0 < np.abs(bits - raw[:, 2]).max() < 0.3
    assert len(np.unique(bits)) == len(np.unique(raw[:, 2]))
    every = "0: contradiction, 1: entailment, 2: neutral"
    assert f"has 3 outputs; name the one to score by with --label ({every})" in refusal(model, tmp_path)
    assert f"has no output 'other'; it has {every}" in refusal(model, tmp_path, label="other")
    assert "has no output '3'" in refusal(model, tmp_path, label="3")
    one = make_encoder(tmp_path / "one", "roberta")
    assert "softmax is for several outputs" in refusal(one, tmp_path, activation="softmax")
    assert "has no output 'entailment'" in refusal(one, tmp_path, label="entailment")


def test_an_instruction_stands_before_the_query(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "plain", "bert")
    asked = scores_of(model, tmp_path, instruction="find the moon: ")
    np.testing.assert_allclose(asked, expected(model, prompt="find the moon: "), atol=1e-5)
    assert np.abs(asked - scores_of(model, tmp_path)).max() > 1e-3
    saved = tmp_path / "saved"
    prompts: Any = {"prompts": {"query": "represent this: ", "other": "x"}, "default_prompt_name": "query"}
    CrossEncoder(str(model), device="cpu", **prompts).save_pretrained(str(saved))
    np.testing.assert_allclose(scores_of(saved, tmp_path), expected(saved), atol=1e-5)
    assert np.abs(expected(saved) - expected(model)).max() > 1e-3
    np.testing.assert_allclose(scores_of(saved, tmp_path, instruction=""), expected(model), atol=1e-5)


def test_a_limit_that_sentence_transformers_saved(tmp_path: Path) -> None:
    """Without modules.json, sentence-transformers does not read the file."""
    model = make_encoder(tmp_path / "plain", "roberta")
    settings = {"transformer_task": "sequence-classification", "max_seq_length": 12}
    (model / "sentence_bert_config.json").write_text(json.dumps(settings))
    whole = expected(model)
    np.testing.assert_allclose(scores_of(model, tmp_path), whole, atol=1e-5)
    saved = tmp_path / "saved"
    CrossEncoder(str(model), device="cpu").save_pretrained(str(saved))
    edit(saved / "sentence_bert_config.json", max_seq_length=12)
    cut = expected(saved)
    assert np.abs(cut - whole).max() > 1e-3
    np.testing.assert_allclose(scores_of(saved, tmp_path), cut, atol=1e-5)
    limited = scores_of(model, tmp_path, max_length=12)
    np.testing.assert_allclose(limited, cut, atol=1e-5)


@pytest.mark.parametrize("kind", slow_but(DECODERS, "qwen3", "llama"))
def test_language_models_that_answer(kind: str, tmp_path: Path) -> None:
    agrees(make_decoder(tmp_path / "model", kind, task="causal", template=PAIR_TEMPLATE), tmp_path, 1e-4)


def test_a_model_whose_long_rows_change_their_neighbours_needs_a_limit(tmp_path: Path) -> None:
    model = make_decoder(
        tmp_path / "model", "llama", task="classifier", template=None, rope_parameters=LONGROPE
    )
    asked = {"prompt_template": "none", "activation": "identity"}
    assert "scores all rows of its batch differently (longrope): use --max-length 24" in refusal(
        model, tmp_path, **asked
    )
    spec = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", "max_length": 24, **asked})
    engine = Engine(load_model(spec, "cpu", "torch", str(tmp_path)), 1000)
    queries, passages = some_pairs(16)
    alone = [engine.score([query], [text]).scores[0] for query, text in zip(queries, passages, strict=True)]
    np.testing.assert_allclose(engine.score(queries, passages).scores, alone, atol=1e-5)


def test_such_a_limit_is_needed_too_if_the_model_is_known(tmp_path: Path) -> None:
    """The description of a ModernBERT is kept in the cache."""
    usual = {"rope_type": "default", "rope_theta": 10_000.0}
    ropes = {"full_attention": LONGROPE, "sliding_attention": usual}
    model = make_encoder(tmp_path / "model", "modernbert, cls", rope_parameters=ropes)
    for _ in range(2):
        assert "use --max-length 24" in refusal(model, tmp_path)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_is_too_long_is_cut_at_the_side_that_is_wanted(side: str, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    cut = {"processor_kwargs": {"truncation_side": side}, "max_length": 40}
    ours = scores_of(model, tmp_path, truncation_side=side, max_length=40, activation="identity")
    theirs = expected(model, load=cut, activation_fn=RAW)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(theirs - expected(model, activation_fn=RAW)).max() > 1e-3


def test_passages_in_a_prompt_have_no_more_tokens_than_are_wanted(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PASSAGES, add_special_tokens=False, truncation=True, max_length=7)["input_ids"]
    pairs = list(zip(QUERIES, tokenizer.batch_decode(ids), strict=True))
    theirs = CrossEncoder(str(model), device="cpu").predict(pairs, batch_size=1, activation_fn=RAW)
    ours = scores_of(model, tmp_path, max_passage_tokens=7, activation="identity")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(theirs - expected(model, activation_fn=RAW)).max() > 1e-3


@pytest.mark.parametrize("most", [1, 3])
def test_a_passage_whose_first_character_has_more_tokens_than_are_wanted(most: int, tmp_path: Path) -> None:
    """A worker that met such an option compared its tokens without an end."""
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    spec = ScoreSpec(model=str(model), precision="fp32", max_passage_tokens=most, activation="identity")
    loaded = load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    scored = Engine(loaded.model(spec), 1000).score(["why", "why"], ["🌕 moon", "a🌕"])
    theirs = CrossEncoder(str(model), device="cpu").predict(
        [("why", ""), ("why", "a")], batch_size=1, activation_fn=RAW
    )
    np.testing.assert_allclose(scored.scores, theirs, atol=1e-4)


@pytest.mark.parametrize("kind", slow_but(["qwen3", "gemma2"], "gemma2"))
def test_their_conversions_to_one_output(kind: str, tmp_path: Path) -> None:
    agrees(make_decoder(tmp_path / "model", kind, task="classifier", template=PAIR_TEMPLATE), tmp_path, 1e-4)


@pytest.mark.parametrize("pooling", ["mean", "eos"])
def test_a_head_that_pools_as_its_config_says(pooling: str, tmp_path: Path) -> None:
    """It was computed from the last token, and refused."""
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    config: Any = {"pooling": pooling, "rope_parameters": ropes, "pad_token_id": 5}
    model = make_decoder(
        tmp_path / "model", "cohere_compass_text", task="classifier", template=PAIR_TEMPLATE, **config
    )
    agrees(model, tmp_path, 1e-4)


@pytest.mark.parametrize("answers", [(7, 9), pytest.param((7, None), marks=pytest.mark.slow)])
def test_a_language_model_as_sentence_transformers_saves_it(
    answers: tuple[int, int | None], tmp_path: Path
) -> None:
    """With answers of its own, variables of the template, prompts, and a limit on the length."""
    make_decoder(tmp_path / "plain", "qwen3", task="causal", template=PASS_ALL_TEMPLATE)
    body = Transformer(
        str(tmp_path / "plain"),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    prompts: Any = {"prompts": {"web": "find: ", "code": "find code: "}, "default_prompt_name": "web"}
    theirs = CrossEncoder(modules=[body, LogitScore(*answers)], device="cpu", **prompts)
    theirs.max_length = 48
    theirs.save_pretrained(str(tmp_path / "model"))
    model = tmp_path / "model"
    for asked in (None, "find it: ", ""):
        ours = scores_of(model, tmp_path, activation="identity", instruction=asked)
        np.testing.assert_allclose(ours, expected(model, activation_fn=RAW, prompt=asked), atol=1e-4)
    np.testing.assert_allclose(scores_of(model, tmp_path), expected(model), atol=1e-4)


@pytest.mark.parametrize("task", ["causal", "classifier"])
@pytest.mark.parametrize("template", [None, PASS_ALL_TEMPLATE])
def test_without_a_prompt_for_pairs_a_language_model_is_refused(
    task: str, template: str | None, tmp_path: Path
) -> None:
    """A chat template that knows no pairs would give scores, but not those of the model."""
    model = make_decoder(tmp_path / "model", "qwen3", task=task, template=template)
    said = refusal(model, tmp_path)
    assert "its files name no prompt for pairs" in said
    assert "use --prompt-template FILE, or bge-reranker-v2-gemma, mxbai-rerank-v2, qwen3-reranker" in said
    ours = scores_of(model, tmp_path, prompt_template=PAIR_TEMPLATE, activation="identity")
    load = {"processor_kwargs": {"chat_template": PAIR_TEMPLATE}}
    np.testing.assert_allclose(ours, expected(model, load=load, activation_fn=RAW), atol=1e-4)
    if template is None:
        spec = ScoreSpec(model=str(model), precision="fp32", prompt_template="none")
        alone = Engine(load_model(spec, "cpu", "torch", str(tmp_path / "cache")), 300).score(
            QUERIES, PASSAGES
        )
        empty = [row for row, texts in enumerate(zip(QUERIES, PASSAGES, strict=True)) if texts == ("", "")]
        reason = "tokenizer: ValueError: the pair has no tokens"
        assert alone.errors == dict.fromkeys(empty, reason)
        others = np.isfinite(alone.scores)
        pairs = [pair for pair in zip(QUERIES, PASSAGES, strict=True) if pair != ("", "")]
        theirs = CrossEncoder(str(model), device="cpu").predict(pairs, batch_size=1)
        np.testing.assert_allclose(alone.scores[others], theirs, atol=1e-4)


def test_a_template_that_cannot_be_filled_is_one_line(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    assert "cannot be filled" in refusal(model, tmp_path, prompt_template="{{ messages | nothing }}")
    dropping = "{{ messages[0].content }}"
    assert "drops the text of the role document" in refusal(model, tmp_path, prompt_template=dropping)
    unknown = "{# answers: certainly not #}" + PAIR_TEMPLATE
    assert "has no token 'certainly'" in refusal(model, tmp_path, prompt_template=unknown)
    encoder = make_encoder(tmp_path / "encoder", "bert")
    assert "reads two texts, not a prompt" in refusal(encoder, tmp_path, prompt_template=PAIR_TEMPLATE)


def test_an_instruction_is_blamed_only_where_the_template_takes_none(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    for template, option in ((strict + PAIR_TEMPLATE, "instruction"), ("{{ messages | nothing }}", None)):
        spec = ScoreSpec(model=str(model), prompt_template=template, instruction="find")
        with pytest.raises(SpecError, match="cannot be filled") as refused:
            load_model(spec, "cpu", "torch", str(tmp_path / "cache"))
        assert refused.value.option == option


def test_an_instruction_that_the_template_drops_is_one_line(tmp_path: Path) -> None:
    """The scores would be those without an instruction."""
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    dropping = (
        "{% for m in messages if m.role in ['query', 'document'] %}{{ m.role }} {{ m.content }}{% endfor %}"
    )
    assert "drops the instruction" in refusal(model, tmp_path, prompt_template=dropping, instruction="find")
    for options in ({"instruction": "Answer it."}, {"prompt_template": dropping, "instruction": ""}):
        assert np.isfinite(scores_of(model, tmp_path, **options)).all()


def test_answers_are_exact_in_fewer_bits(tmp_path: Path) -> None:
    """In bf16 logits of 8 bits would make ties of their differences."""
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    exact = scores_of(model, tmp_path, activation="identity")
    bits = scores_of(model, tmp_path, activation="identity", precision="bf16")
    assert 0 < np.abs(bits - exact).max() < 0.3 * np.abs(exact).max()
    assert len(np.unique(bits)) >= len(np.unique(exact.round(4)))  # some pairs are the same


def test_a_template_may_name_the_answers(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    ours = scores_of(model, tmp_path, prompt_template="{# answers: 1 0 #}" + PAIR_TEMPLATE)
    theirs = CrossEncoder(str(model), device="cpu")
    ids = theirs.tokenizer.convert_tokens_to_ids(["1", "0"])
    theirs[1].true_token_id, theirs[1].false_token_id = ids
    np.testing.assert_allclose(ours, theirs.predict(list(zip(QUERIES, PASSAGES, strict=True))), atol=1e-4)


QWEN3 = (  # as the model's card has it
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: far?\n<Document>: a moon<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_the_shipped_templates(tmp_path: Path) -> None:
    tokenizer = CrossEncoder(str(make_encoder(tmp_path, "bert")), device="cpu").tokenizer
    chat = [{"role": "query", "content": "far?"}, {"role": "document", "content": "a moon"}]

    def filled(name: str, *system: dict[str, str]) -> str:
        template = read_template(name)
        text: str = tokenizer.apply_chat_template(
            [*system, *chat], chat_template=template, tokenize=False, bos_token="<bos>"
        )
        return text

    assert filled("qwen3-reranker") == QWEN3
    instead = filled("qwen3-reranker", {"role": "system", "content": "Do it."})
    assert "<Instruct>: Do it.\n<Query>: far?\n" in instead
    for name in shipped_templates():
        assert filled(name).count("far?") == filled(name).count("a moon") == 1


def test_a_run_brings_its_prompt_and_its_label_to_the_workers(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    labelled = make_encoder(tmp_path / "labelled", "roberta", 3, **LABELS)
    answering = make_decoder(tmp_path / "answering", "qwen3", task="causal", template=None)
    workers()
    client, pairs = Client(server.url), list(zip(QUERIES, PASSAGES, strict=True))
    asked: Any = {"label": "neutral", "activation": "softmax", "instruction": "see: "}
    ours = client.score(pairs, timeout=120, model=str(labelled), precision="fp32", **asked)
    theirs = expected(labelled, apply_softmax=True, prompt="see: ")
    np.testing.assert_allclose(ours, theirs[:, 2], atol=1e-5)
    file = tmp_path / "pairs.jinja"
    file.write_text(PAIR_TEMPLATE)
    for template in (PAIR_TEMPLATE, str(file)):
        asked = {"prompt_template": template, "instruction": "Find it."}
        ours = client.score(pairs, timeout=120, model=str(answering), precision="fp32", **asked)
        load = {"processor_kwargs": {"chat_template": PAIR_TEMPLATE}}
        np.testing.assert_allclose(ours, expected(answering, load=load, prompt="Find it."), atol=1e-4)
    with pytest.raises(RunFailed, match="use --prompt-template"):
        client.score(pairs, timeout=120, model=str(answering))
    with pytest.raises(ConfigError, match=r"nothing\.jinja is not a template .*one of bge-reranker-v2-gemma"):
        client.score(pairs, model=str(answering), prompt_template="nothing.jinja")


@pytest.mark.parametrize("instruction", [None, "see: "])
def test_long_passages_count_by_their_best_window(instruction: str | None, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    spec = ScoreSpec(
        model=str(model), precision="fp32", long="split", long_stride=10, instruction=instruction
    )
    engine = Engine(load_model(spec, "cpu", "torch", str(tmp_path / "cache")), 500)
    words = [f"{['moon', 'the', 'pair'][n % 3]} {n}" for n in range(60)]
    passages = ["the moon", " ".join(words), "", " ".join(words[:40]), "the pair " * 40]
    queries = ["moon"] * 4 + ["a pair " * 30]
    scored = engine.score(queries, passages)
    assert scored.errors == {}
    cut = engine.model.windows
    assert cut is not None
    rows, _, texts = cut.cut(queries, passages)
    counts = np.bincount(rows)
    assert counts[[0, 2, 4]].tolist() == [1, 1, 1]  # fit, or have a query that leaves no room
    assert counts[1] > counts[3] > 2
    assert scored.windows == counts[1] + counts[3]
    alone = [engine.score([query], [text]).tokens for query, text in zip(queries, passages, strict=True)]
    assert prepare(engine.model, queries, passages).row_tokens.tolist() == alone  # of all windows of a pair
    assert scored.tokens == sum(alone)
    plain = CrossEncoder(str(model), device="cpu")
    assert texts is not None
    pairs = [(queries[row], text) for row, text in zip(rows, texts, strict=True)]
    each = plain.predict(pairs, prompt=instruction)
    best = [each[rows == row].max() for row in range(5)]
    np.testing.assert_allclose(scored.scores, best, atol=1e-5)
    of_one = [text.split() for row, text in zip(rows, texts, strict=True) if row == 1]
    assert set(words) <= {" ".join(pair) for text in of_one for pair in pairwise(text)}
    lengths = engine.model.tokenizer([queries[row] for row in rows], texts).lengths[rows == 1]
    assert lengths.max() <= 64
    assert lengths.min() >= 58  # the last is as long as the others


LOWER = {"normalizer": {"type": "Lowercase"}}
DIGITS = {
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
}


@pytest.mark.parametrize(
    ("name", "config", "entries"),
    [
        pytest.param("xlm-roberta", {"add_prefix_space": False}, {}, id="as polish-reranker's"),
        pytest.param("roberta", {}, LOWER, id="lower case"),
        pytest.param("roberta", {}, DIGITS, id="digits apart"),
    ],
)
def test_tokens_are_those_of_the_model_s_own_file(
    name: str, config: dict[str, Any], entries: dict[str, Any], tmp_path: Path
) -> None:
    """Transformers makes the tokenizer as is usual for its class: other words, and no error."""
    model = make_encoder(tmp_path / "model", name)
    edit(model / "tokenizer_config.json", **config)
    edit(model / "tokenizer.json", **entries)
    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    own.no_truncation()
    queries, passages = ["How far is 384400 km", "Why"], ["The Moon is 17 km AWAY", "so FAR 12 3"]
    expected = [row.ids for row in own.encode_batch(list(zip(queries, passages, strict=True)))]
    spec = ScoreSpec(model=str(model), precision="fp32")
    for _ in range(2):  # the second time from the cache
        loaded = load_model(spec, "cpu", "torch", str(tmp_path / "cache"))
        assert [*ids_of(prepare(loaded, queries, passages).tokens)] == expected
    assert load_proven(spec, "cpu", "torch", str(tmp_path / "cache")).proof


def test_so_are_they_if_the_model_usually_has_another_kind_of_tokenizer(tmp_path: Path) -> None:
    """Transformers made byte pairs of T5's words, because the config is one of Qwen2."""
    save_tokenizer(tmp_path, "t5", 96)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("How far is the moon", "  so far </s> 12 "):
        ids = load_tokenizer(tmp_path, None)(text, add_special_tokens=False)["input_ids"]
        assert ids == own.encode(text, add_special_tokens=False).ids
