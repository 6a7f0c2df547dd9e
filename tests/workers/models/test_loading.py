"""What cannot be the model that its files say is refused in one line, before anything is scored with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, ModernBertForTokenClassification

from rankmill import Client
from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.conftest import Server, StartWorker
from tests.harness.models.rerankers import make_chain, make_encoder
from tests.harness.models.tiny import make_bert

PAIR = ["how far"], ["a cat and the moon"]
Change = Callable[[dict[str, Any]], object]


def score(model: Path, backend: str = "torch") -> float:
    spec = ScoreSpec(model=str(model), precision="fp32", activation="identity")
    scored = Engine(load_model(spec, "cpu", backend, str(model.with_name("cache"))), 64).score(*PAIR)
    assert not scored.errors
    return float(scored.scores[0])


def change_weights(model: Path, change: Change) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def edit(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


DAMAGED: dict[str, tuple[Change, str]] = {
    "no head": (
        lambda weights: [weights.pop(f"classifier.{name}") for name in ("weight", "bias")],
        r"has no classifier\.bias and 1 more weights: it is not a cross-encoder, or not a bert",
    ),
    "a weight less": (
        lambda weights: weights.pop("bert.encoder.layer.1.output.dense.bias"),
        r"has no weight bert\.encoder\.layer\.1\.output\.dense\.bias",
    ),
    "another shape": (
        lambda weights: weights.update({"bert.pooler.dense.bias": weights["classifier.weight"][0, :7] + 1}),
        r"has a weight bert\.pooler\.dense\.bias of shape \[7\], where its config\.json wants \[32\]",
    ),
    "another attention": (
        lambda weights: weights.update(
            {
                "bert.encoder.layer.0.attention.self.distance_embedding.weight": weights["classifier.weight"]
                + 1
            }
        ),
        r"has weight bert\.encoder\.layer\.0\.attention\.self\.distance_embedding\.weight, which a bert",
    ),
    "more layers": (
        lambda weights: weights.update(
            {
                name.replace("layer.1", "layer.2"): value.clone()
                for name, value in weights.items()
                if "layer.1" in name
            }
        ),
        r"has bert\.encoder\.layer\.2\..* and 15 more weights, which a bert as in its config\.json does not",
    ),
}


@pytest.mark.parametrize("backend", ["torch", "openvino", "onnx", "mlx"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_weights_that_are_not_the_model_s(damage: str, backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "mlx": "mlx.core"}.get(backend, backend))
    change, message = DAMAGED[damage]
    change_weights(make_bert(tmp_path), change)
    with pytest.raises(SpecError, match=message):
        score(tmp_path, backend)


def test_heads_for_other_tasks_do_no_harm(tmp_path: Path) -> None:
    before = score(make_bert(tmp_path))
    others = BertForMaskedLM.from_pretrained(tmp_path).cls.state_dict()

    def add(weights: dict[str, Any]) -> None:
        weights.update({f"cls.{name}": value.clone() for name, value in others.items()})
        weights["bert.embeddings.position_ids"] = weights["bert.pooler.dense.bias"].long()

    change_weights(tmp_path, add)
    assert score(tmp_path) == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize(
    "entries",
    [
        {"position_embedding_type": "alibi"},
        {"position_embedding_type": "relative_key_query"},
        {"auto_map": {"AutoModelForSequenceClassification": "code.OtherForSequenceClassification"}},
        {"auto_map": {"AutoConfig": "some/repo--configuration.OtherConfig"}},
        {"is_decoder": True},
    ],
)
def test_an_architecture_that_transformers_does_not_have(
    entries: dict[str, object], backend: str, tmp_path: Path
) -> None:
    pytest.importorskip(backend)
    edit(make_bert(tmp_path) / "config.json", **entries)
    with pytest.raises(
        SpecError, match=rf"is not a bert as transformers has it \({next(iter(entries))}: .*\)"
    ):
        score(tmp_path, backend)


def test_code_that_transformers_has_taken_over_is_not_needed(tmp_path: Path) -> None:
    native = {"AutoModelForSequenceClassification": "modeling_bert.BertForSequenceClassification"}
    edit(make_bert(tmp_path) / "config.json", auto_map=native)
    tokenizer = {"AutoTokenizer": ["tokenization_bert.BertTokenizer", "tokenization_bert.BertTokenizerFast"]}
    edit(tmp_path / "tokenizer_config.json", auto_map=tokenizer)
    score(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["code.OtherTokenizer", None],
        {"AutoTokenizer": ["some/repo--code.OtherTokenizer", None]},
        {"AutoTokenizer": "code.OtherTokenizer"},
    ],
)
def test_a_tokenizer_that_transformers_does_not_have(names: object, tmp_path: Path) -> None:
    """Transformers used another one, without an error."""
    edit(make_bert(tmp_path) / "tokenizer_config.json", auto_map=names)
    with pytest.raises(SpecError, match=r"has a tokenizer that transformers does not have \(.*code.OtherTok"):
        score(tmp_path)


def test_a_classifier_of_tokens_is_no_cross_encoder(tmp_path: Path) -> None:
    """In ModernBERT and some other families it has the same weights."""
    model = make_encoder(tmp_path / "model", "modernbert, cls")
    ModernBertForTokenClassification.from_pretrained(model).save_pretrained(model)
    with pytest.raises(SpecError, match="is a ModernBertForTokenClassification, which labels tokens"):
        score(model)


ALBERT = {"model_type": "albert", "num_hidden_groups": 100}
"""Its layers are the product of two entries, of which each is allowed to be 1,000."""


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": "abc"}, "cannot load .*'hidden_size' expected int, got str"),
        ({"hidden_act": "no_such_function"}, "cannot load .*KeyError: 'no_such_function'"),
        ({"num_hidden_layers": 10**9}, "has 1,000,000,000 layers"),
        ({"vocab_size": 10**9}, "parameters, but its config.json describes 32,0"),
        ({"num_labels": 5_000_000}, "has 5,000,000 labels in its config.json .*, but at most 16,384"),
        ({"num_labels": 10**9}, "has 1,000,000,000 labels"),
        ({"id2label": {str(n): f"L{n}" for n in range(20_000)}}, "has 20,000 labels"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "has 1,000,000,000 layers"),
        ({"encoder": {"n_layer": 10**9}}, "has 1,000,000,000 layers"),
        ({"attention_types": [[["global", "local"], 10**9]]}, "has 1,000,000,000 parts"),
        ({"num_hashes": 300_000}, "has 300,000 parts"),
        ({"attention_window": [8, 10**9]}, "has 1,000,000,000 parts"),
        ({"num_hidden_layers": 1000}, "describes more than 1,[0-9]{3} modules"),
        ({**ALBERT, "inner_group_num": 100}, "describes more than 1,[0-9]{3} modules"),
        ({"intermediate_size": 10**18}, "cannot load the model in"),
        ({"num_attention_heads": 0}, "cannot load the model in"),
        ({"max_position_embeddings": -5}, "cannot load the model in"),
        ({"model_type": "no-such-model"}, "cannot load .*no-such-model"),
    ],
)
def test_a_config_that_is_no_model_s(entries: dict[str, object], message: str, tmp_path: Path) -> None:
    edit(make_bert(tmp_path) / "config.json", **entries)
    with pytest.raises(SpecError, match=message) as caught:
        score(tmp_path)
    assert "\n" not in str(caught.value)


def test_labels_of_a_chain_that_is_no_model_s(tmp_path: Path) -> None:
    def modules(width: int) -> list[Any]:
        from sentence_transformers.base.modules import Dense
        from sentence_transformers.sentence_transformer.modules import Pooling

        last = {"module_output_name": "scores", "activation_function": torch.nn.Identity()}
        return [Pooling(width, "cls"), Dense(width, 1, **last)]

    model = make_chain(tmp_path, "bert", modules)
    score(model)
    dense = next(model.glob("*Dense/config.json"))
    edit(dense, out_features=10**9)
    with pytest.raises(SpecError, match="has 1,000,000,000 labels"):
        score(model)
    edit(dense, out_features=1, in_features=10**12)
    with pytest.raises(SpecError, match=r"Dense/model\.safetensors does not fit its config\.json"):
        score(model)


def test_words_of_a_model_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model")
    modules = [
        {"type": "x.Transformer", "path": ""},
        {"type": "x.\x1b[2J\x9b31m\u202e\ud800evil", "path": "1"},
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(SpecError) as caught:
        score(model)
    # Redis takes no lone surrogate: workers ended
    assert "\\x1b[2J\\x9b31m\\u202e\\ud800evil" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[1, 2]"),
        ("config.json", "{"),
        ("config.json", "\xff" * 9),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "WordPiece", "vocab": 7}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"model_max_length": "many"}'),
        ("model.safetensors", ""),
        ("modules.json", "{}"),
    ],
)
def test_files_that_are_something_else(name: str, text: str, tmp_path: Path) -> None:
    (make_bert(tmp_path) / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError) as caught:
        score(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncated_weights(tmp_path: Path) -> None:
    weights = make_bert(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(SpecError, match="bytes, and its header describes"):
        score(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("whole"), hidden=8)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["bert", "roberta", "t5", "gelu_new", "relu", "torch.nn.Tanh", "float16"]),
    st.sampled_from([[], {}, [[]], [1], ["a"]]),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def refusal(model: Path) -> str:
    """Why a model cannot be loaded; empty if it can."""
    try:
        load_model(ScoreSpec(model=str(model), precision="fp32"), "cpu", "torch")
    except SpecError as error:
        return str(error)
    return ""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to everything in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
def test_whatever_stands_in_a_model_s_files(
    data: st.DataObject, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is scored, or one line says that it cannot be."""
    model = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(whole, model)
    file = model / data.draw(st.sampled_from(FILES))
    found = json.loads(file.read_text())
    path = data.draw(st.sampled_from(sorted(places(found), key=str)))
    file.write_text(json.dumps(replaced(found, path, data.draw(ODD))))
    said = refusal(model)
    assert "\n" not in said
    assert len(said) < 700


@given(
    cut=st.floats(0, 1),
    at=st.floats(0, 1),
    byte=st.integers(0, 255),
    name=st.sampled_from([*FILES, "model.safetensors"]),
)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_damaged_bytes(
    cut: float, at: float, byte: int, name: str, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(whole, model)
    content = bytearray((model / name).read_bytes())
    content[int(at * (len(content) - 1))] = byte
    (model / name).write_bytes(content[: int(len(content) * max(cut, 0.5 * (byte % 2)))])
    assert "\n" not in refusal(model)


def test_a_run_with_such_a_model_ends_at_once_and_the_worker_goes_on(
    server: Server, workers: StartWorker, tmp_path: Path, tiny_model: Path
) -> None:
    edit(make_bert(tmp_path) / "config.json", hidden_act="no_such_function")
    workers()
    with pytest.raises(Exception, match="no_such_function"):
        list(Client(server.url, model=str(tmp_path)).submit([("how", "far")] * 4))
    assert len(Client(server.url, model=str(tiny_model)).score([("how", "far")], timeout=60)) == 1
