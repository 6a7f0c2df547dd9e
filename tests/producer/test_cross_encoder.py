"""The drop-in agrees with sentence-transformers' CrossEncoder, alone and inside its tools."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder as Original
from sentence_transformers.base.modules import Dense
from sentence_transformers.cross_encoder.evaluation import (
    CrossEncoderClassificationEvaluator,
    CrossEncoderCorrelationEvaluator,
    CrossEncoderRerankingEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import mine_hard_negatives

from rankmill import Client, CrossEncoder
from rankmill.jobs.contract.errors import ConfigError, InputError, NoWorkers
from tests.conftest import Server, run_command
from tests.harness.models.embeddings import bags
from tests.harness.models.rerankers import make_chain
from tests.harness.models.tiny import make_bert
from tests.harness.servers.valkey import nothing_left

pytestmark = pytest.mark.own_precision

PAIRS = [(query, f"moon river {'big ' * (n % 5)}{n}") for n in range(12) for query in ("how far", "big cat")]


@pytest.fixture(scope="module")
def original(tiny_model: Path) -> Original:
    return Original(str(tiny_model), device="cpu")


@pytest.fixture(scope="module")
def ours(shared_queue: Server, tiny_model: Path) -> CrossEncoder:
    return CrossEncoder(str(tiny_model), redis_url=shared_queue.url, device="cpu")


@pytest.fixture(scope="module")
def judges(shared_queue: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[CrossEncoder, Original]:
    """Ours and theirs of a model with three labels."""
    model = str(make_bert(tmp_path_factory.mktemp("labels") / "model", labels=3))
    return CrossEncoder(model, redis_url=shared_queue.url), Original(model, device="cpu")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"convert_to_tensor": True},
    {"convert_to_numpy": False},
    {"activation_fn": torch.nn.Identity()},
    {"activation_fn": torch.nn.Sigmoid()},
    {"activation_fn": torch.nn.Tanh()},
    {"prompt": "query: "},
    {"batch_size": 3, "show_progress_bar": True},
    {"num_workers": 2, "activation_fct": torch.nn.Sigmoid()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_predict_agrees(ours: CrossEncoder, original: Original, options: dict[str, Any]) -> None:
    expected, found = original.predict(PAIRS, **options), ours.predict(PAIRS, **options)
    assert type(found) is type(expected)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-5)


@pytest.mark.parametrize(
    "inputs", [PAIRS[0], list(PAIRS[0]), np.array(PAIRS[0]), np.array(PAIRS[:3]), [list(PAIRS[0])]]
)
def test_one_pair_arrays_and_lists(ours: CrossEncoder, original: Original, inputs: Any) -> None:
    expected, found = original.predict(inputs), ours.predict(inputs)
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert ours.predict([]).shape == (0,)


def test_inputs_may_have_their_older_name(ours: CrossEncoder) -> None:
    np.testing.assert_array_equal(ours.predict(sentences=PAIRS), ours.predict(PAIRS))
    with pytest.raises(ConfigError, match="sentences is the older name of an argument that is given, too"):
        ours.predict(PAIRS, sentences=PAIRS)


def test_rank_agrees(ours: CrossEncoder, original: Original) -> None:
    documents = [passage for _, passage in PAIRS[::2]]
    choices: list[dict[str, Any]] = [
        {},
        {"top_k": 3, "return_documents": True},
        {"apply_softmax": True, "convert_to_tensor": True, "num_workers": 1},
    ]
    for options in choices:
        expected = original.rank("how far", documents, **options)
        found = ours.rank("how far", documents, **options)
        assert [each["corpus_id"] for each in found] == [each["corpus_id"] for each in expected]
        assert [each.keys() for each in found] == [each.keys() for each in expected]
        assert [each["score"] for each in found] == pytest.approx(
            [each["score"] for each in expected], abs=1e-5
        )
        assert {type(each["score"]) for each in json.loads(json.dumps(found))} == {float}
    series: Any = pd.Series(documents, index=range(len(documents))[::-1])
    texts = [each["text"] for each in ours.rank("how far", documents, return_documents=True)]
    assert [each["text"] for each in ours.rank("how far", series, return_documents=True)] == texts
    with pytest.raises(ConfigError, match="top_k is -1; give a number of at least 1"):
        ours.rank("how far", documents, top_k=-1)


def test_several_labels_agree(judges: tuple[CrossEncoder, Original]) -> None:
    ours, original = judges
    options: list[dict[str, Any]] = [
        {}, {"apply_softmax": True}, {"convert_to_tensor": True}, {"activation_fn": torch.nn.Tanh()}
    ]  # fmt: skip
    for each in options:
        expected, found = original.predict(PAIRS, **each), ours.predict(PAIRS, **each)
        assert (type(found), found.shape) == (type(expected), (len(PAIRS), 3))
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-5)
    assert ours.predict(PAIRS[0]).shape == (3,)
    assert ours.num_labels == original.num_labels == 3
    with pytest.raises(ConfigError, match="documents are ranked by one score, and the model has several"):
        ours.rank("a", ["b"])


def test_the_length_can_be_assigned(ours: CrossEncoder, tiny_model: Path, shared_queue: Server) -> None:
    original, copied = Original(str(tiny_model), device="cpu"), copy.copy(ours)
    long = [(query, passage * 9) for query, passage in PAIRS]
    for length in (12, 40, 9):
        original.max_seq_length = copied.max_length = length
        assert copied.max_seq_length == length
        np.testing.assert_allclose(copied.predict(long), original.predict(long), atol=1e-5)
    copied.max_seq_length = None
    np.testing.assert_allclose(copied.predict(long), ours.predict(long), atol=1e-5)
    assert copied.max_length == Original(str(tiny_model), device="cpu").max_seq_length == 128
    for wrong in (0, "12", True):
        with pytest.raises(ConfigError, match="give a number of tokens"):
            copied.max_length = wrong
    by_kwargs = CrossEncoder(
        str(tiny_model), redis_url=shared_queue.url, tokenizer_kwargs={"model_max_length": 12}
    )
    original.max_seq_length = 12
    np.testing.assert_allclose(by_kwargs.predict(long), original.predict(long), atol=1e-5)
    by_kwargs.max_length = None
    assert by_kwargs.max_length == 128


@pytest.mark.parametrize("name", ["tokenizer", "config", "device", "num_labels", "model", "maximum_length"])
def test_what_workers_would_not_see_cannot_be_assigned(ours: CrossEncoder, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be assigned: workers have the model"):
        setattr(ours, name, None)


CHANGES: dict[str, Callable[[CrossEncoder], object]] = {
    "tokenizer": lambda model: setattr(model.tokenizer, "truncation_side", "left"),
    "tokenizer, length": lambda model: setattr(model.tokenizer, "model_max_length", 12),
    "tokenizer, template": lambda model: setattr(model.tokenizer, "chat_template", "{{ messages }}"),
    "config": lambda model: setattr(model.config, "hidden_act", "relu"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_tokenizer_or_config_is_refused(ours: CrossEncoder, what: str) -> None:
    changed = copy.copy(ours)
    assert changed.tokenizer(["a"], ["b"]).input_ids
    changed.predict(PAIRS)
    CHANGES[what](changed)
    with pytest.raises(
        ConfigError, match=f"{what.partition(',')[0]} was changed, and workers would not see it"
    ):
        changed.predict(PAIRS)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "code": ({"trust_remote_code": True}, "trust_remote_code: code from model repositories is never run"),
    "modules": ({"modules": [torch.nn.Identity()]}, "modules: workers load models from their files"),
    "cache": ({"cache_folder": "/tmp"}, "cache_folder: workers keep the models; set HF_HUB_CACHE"),
    "local": ({"local_files_only": True}, "local_files_only: workers read the models; set HF_HUB_OFFLINE=1"),
    "token": ({"token": "secret"}, "token: workers read the models; set HF_TOKEN where they run"),
    "fp32": ({"keep_in_fp32_modules": ["a"]}, "keep_in_fp32_modules: the last projection computes in fp32"),
    "model": ({"model_kwargs": {"quantization_config": 1}}, "model_kwargs: quantization_config is refused"),
    "dtype": ({"automodel_args": {"torch_dtype": torch.float64}}, "dtype is float64; give float32"),
    "tokenizer": ({"tokenizer_args": {"vocab_file": "a"}}, "processor_kwargs: vocab_file is refused"),
    "config": ({"config_kwargs": {"hidden_act": "relu"}}, "config_kwargs: hidden_act is refused"),
    "twice": ({"model_kwargs": {}, "automodel_args": {}}, "automodel_args is the older name of an argument"),
    "both": ({"precision": "bf16", "model_kwargs": {"dtype": "float32"}}, "precision is given twice, 'bf16'"),
    "typo": ({"max_lenght": 3}, "max_lenght: there is no such option"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_are_not_done_are_refused_by_name(shared_queue: Server, kind: str) -> None:
    options, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=re.escape(message)):
        CrossEncoder("a/b", redis_url=shared_queue.url, **options)


def test_arguments_that_ask_for_nothing_are_taken(shared_queue: Server, tiny_model: Path) -> None:
    model = CrossEncoder(
        str(tiny_model),
        redis_url=shared_queue.url,
        num_labels=1,
        device=["cuda:0", "cuda:1"],
        trust_remote_code=False,
        local_files_only=True,
        cache_folder=None,
        token=None,
        model_kwargs={"dtype": torch.float32, "attn_implementation": "eager", "device_map": "auto"},
        processor_kwargs={"use_fast": True},
        config_kwargs={},
        default_activation_function=torch.nn.Identity(),
        model_card_data=None,
        backend="torch",
    )
    original = Original(str(tiny_model), device="cpu", activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(model.predict(PAIRS), original.predict(PAIRS), atol=1e-5)
    with pytest.raises(ConfigError, match="predict: processing_kwargs is refused"):
        model.predict(PAIRS, processing_kwargs={})
    wrong = CrossEncoder(str(tiny_model), redis_url=shared_queue.url, num_labels=3)
    with pytest.raises(
        ConfigError, match=r"num_labels is 3, and model .* has 1: leave num_labels out, because another"
    ):
        wrong.predict(PAIRS)


def test_the_precision_is_fp32_unless_another_is_named(
    shared_queue: Server, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the argument, a dtype, the settings, or a method of torch's modules."""

    def named(**options: Any) -> str:
        return CrossEncoder(str(tiny_model), redis_url=shared_queue.url, **options).client.settings.precision

    assert (named(), named(precision="auto"), named(precision="bf16")) == ("fp32", "auto", "bf16")
    assert named(model_kwargs={"torch_dtype": "bfloat16"}) == "bf16"
    monkeypatch.setenv("RANKMILL_PRECISION", "bf16")
    assert (named(), named(precision="fp32")) == ("bf16", "fp32")
    monkeypatch.delenv("RANKMILL_PRECISION")
    model = CrossEncoder(str(tiny_model), redis_url=shared_queue.url)
    exact = model.predict(PAIRS)
    changes: list[Callable[[], CrossEncoder]] = [model.bfloat16, lambda: model.to(dtype=torch.bfloat16)]
    for change in changes:
        assert change() is model
        assert 0 < abs(model.predict(PAIRS) - exact).max() < 0.1
        same = model.float().to("cuda:0").cuda().cpu().eval().train(mode=False)
        np.testing.assert_allclose(same.predict(PAIRS), exact, atol=1e-5)
    with pytest.raises(ConfigError, match="workers only score; train with sentence_transformers"):
        model.train()


def test_it_says_what_it_is_not(ours: CrossEncoder, original: Original) -> None:
    assert ours.device == original.device
    assert ours.config.architectures == original.config.architectures
    assert ours.tokenizer.get_vocab() == original.tokenizer.get_vocab()
    assert not hasattr(ours, "save_pretrained")
    with pytest.raises(AttributeError, match="has no fit: workers have the model; sentence_transformers"):
        _ = ours.fit


def test_a_copy_in_another_process_scores_the_same(ours: CrossEncoder) -> None:
    there = copy.copy(ours)
    there.max_length, there.prompts = 12, {"query": "find: "}
    code = (
        "import pickle, sys; model = pickle.load(sys.stdin.buffer);"
        f"print(model.predict({PAIRS!r}, prompt_name='query').tolist())"
    )
    sent = pickle.dumps(there)
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    np.testing.assert_allclose(json.loads(done.stdout), there.predict(PAIRS, prompt_name="query"), atol=1e-5)


def test_a_copy_waits_as_long_for_workers(server: Server) -> None:
    there = copy.deepcopy(CrossEncoder("demo", redis_url=server.url, no_workers_seconds=0.1))
    with pytest.raises(NoWorkers):
        there.client.score(PAIRS, timeout=20)  # less than the usual patience


def test_the_model_s_own_prompts_give_way(shared_queue: Server, tmp_path: Path) -> None:
    dense = {"activation_function": torch.nn.Identity(), "module_output_name": "scores"}
    model = make_chain(
        tmp_path,
        "bert",
        lambda width: [Pooling(width, "cls"), Dense(width, 1, **dense)],
        prompts={"find": "find: "},
        default_prompt_name="find",
    )
    ours, original = CrossEncoder(str(model), redis_url=shared_queue.url), Original(str(model), device="cpu")
    choices: list[dict[str, Any]] = [{}, {"prompt": "the moon: "}, {"prompt": ""}]
    found = [ours.predict(PAIRS, **each) for each in choices]
    for scores, each in zip(found, choices, strict=True):
        np.testing.assert_allclose(scores, original.predict(PAIRS, **each), atol=1e-5)
    assert abs(found[0] - found[1]).max() > 1e-4


SCRIPT = """
from {package} import CrossEncoder

model = CrossEncoder({model!r}, device="cpu")
print(model.predict({pairs!r}).tolist())
"""


def test_a_script_needs_another_import_and_no_server(tiny_model: Path, tmp_path: Path) -> None:
    """Two models share the server and the workers that the first one starts, and leave nothing."""
    environ = {"REDIS_URL": "", "TMPDIR": str(tmp_path)}
    other = str(make_bert(tmp_path / "other", seed=1))
    more = f"""
other = CrossEncoder({other!r}, device="cpu")
print(other.predict({PAIRS[:3]!r}).tolist(), other.client.url == model.client.url)
with CrossEncoder({other!r}, device="cpu", model_cache_size=3) as third:
    print(third.client.url == model.client.url)
other.close()
print(model.predict({PAIRS[:3]!r}).tolist())
"""
    script = SCRIPT.format(package="rankmill", model=str(tiny_model), pairs=PAIRS[:3])
    done = run_command("python", "-c", script + more, environ=environ)
    assert done.code == 0, done.err
    first, second, third, again = done.out.splitlines()
    expected = [Original(each, device="cpu").predict(PAIRS[:3]) for each in (str(tiny_model), other)]
    np.testing.assert_allclose(json.loads(first), expected[0], atol=1e-5)
    assert second.endswith(" True")
    np.testing.assert_allclose(json.loads(second.rpartition(" ")[0]), expected[1], atol=1e-5)
    assert (third, again) == ("False", first)
    assert not list(tmp_path.glob("rankmill-*"))


def test_an_activation_of_the_caller_s_is_not_taken_for_torch_s(ours: CrossEncoder) -> None:
    class Identity(torch.nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return -logits

    plain = ours.predict(PAIRS, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(ours.predict(PAIRS, activation_fn=Identity()), -plain, atol=1e-5)


@pytest.mark.parametrize("labels", [1, 3])
def test_the_evaluator_of_classes_gives_the_same_figures(
    ours: CrossEncoder, original: Original, judges: tuple[CrossEncoder, Original], labels: int
) -> None:
    mine, theirs = (ours, original) if labels == 1 else judges
    scores = theirs.predict(PAIRS)
    of_pairs = (scores > np.median(scores)) if labels == 1 else scores.argmax(1)
    gold = of_pairs.astype(int)
    gold[::5] = (gold[::5] + 1) % max(labels, 2)
    evaluator = CrossEncoderClassificationEvaluator(list(map(list, PAIRS)), gold.tolist(), write_csv=False)
    found = evaluator(mine)
    assert found == pytest.approx(evaluator(theirs), abs=1e-5)
    assert 0 < found[evaluator.primary_metric] < 1


def test_the_evaluator_of_correlations_gives_the_same_figures(ours: CrossEncoder, original: Original) -> None:
    gold = np.linspace(0, 1, len(PAIRS)).tolist()
    evaluator = CrossEncoderCorrelationEvaluator(list(map(list, PAIRS)), gold, write_csv=False)
    assert evaluator(ours) == pytest.approx(evaluator(original), abs=1e-4)


def test_an_evaluator_gives_the_same_figures(ours: CrossEncoder, original: Original) -> None:
    texts = [passage for _, passage in PAIRS[::2]]
    samples = [
        {"query": query, "positive": texts[at : at + 2], "negative": texts[:at] + texts[at + 2 :]}
        for at, query in ((2, "how far"), (6, "big cat"))
    ]
    evaluator = CrossEncoderRerankingEvaluator(samples, at_k=3, show_progress_bar=False, write_csv=False)
    expected = evaluator(original)
    found = evaluator(ours)
    assert found == pytest.approx(expected)
    assert 0 < expected["map"] < 1


def test_mine_hard_negatives_mines_the_same(ours: CrossEncoder, original: Original) -> None:
    queries = [f"how far is {n}" for n in range(6)]
    dataset = Dataset.from_dict({"query": queries, "answer": [PAIRS[2 * n][1] for n in range(6)]})
    corpus = [passage for _, passage in PAIRS[::2]]
    found, expected = (
        mine_hard_negatives(
            dataset,
            bags(),
            corpus=corpus,
            cross_encoder=each,
            range_max=8,
            num_negatives=2,
            absolute_margin=-10.0,
            output_format="triplet",
            verbose=False,
        )
        for each in (ours, original)
    )
    assert len(expected) >= 6
    assert found.to_list() == expected.to_list()
    pool = ours.start_multi_process_pool(["cpu", "cpu"])
    np.testing.assert_array_equal(ours.predict(PAIRS, pool=pool), ours.predict(PAIRS))
    ours.stop_multi_process_pool(pool)


def test_pyterrier_pipelines_run_with_either(ours: CrossEncoder, original: Original) -> None:
    import pyterrier as pt  # its first import takes a second

    found = pd.DataFrame(
        {"qid": str(n % 2), "query": query, "docno": f"d{n}", "text": text, "score": -n, "rank": n // 2}
        for n, (query, text) in enumerate(PAIRS)
    )
    topics = found[["qid", "query"]].drop_duplicates()
    judged = pd.DataFrame({"qid": ["0", "1"], "docno": ["d14", "d9"], "label": [1, 1]})

    def pipeline(model: Any) -> Any:
        """BM25's results, as if from an index, and their best three by the model."""

        def scores(rows: pd.DataFrame) -> Any:
            return model.predict(list(zip(rows["query"], rows["text"], strict=True)))

        return (pt.Transformer.from_df(found) >> pt.apply.doc_score(scores, batch_size=7)) % 3

    mine, theirs = (pipeline(model)(topics).sort_values(["qid", "rank"]) for model in (ours, original))
    assert (
        mine[["qid", "docno", "rank"]].to_numpy().tolist()
        == theirs[["qid", "docno", "rank"]].to_numpy().tolist()
    )
    assert mine["score"].to_list() == pytest.approx(theirs["score"].to_list(), abs=1e-5)
    figures = pt.Experiment(
        [pipeline(ours), pipeline(original)], topics, judged, ["recip_rank", "ndcg_cut_3"]
    )
    assert figures.iloc[0, 1:].tolist() == pytest.approx(figures.iloc[1, 1:].tolist())


def test_prompts_by_name(shared_queue: Server, tiny_model: Path) -> None:
    prompts = {"query": "find: "}
    original = Original(str(tiny_model), device="cpu", prompts=prompts, default_prompt_name="query")
    ours = CrossEncoder(
        str(tiny_model),
        redis_url=shared_queue.url,
        prompts=prompts,
        default_prompt_name="query",
    )
    np.testing.assert_allclose(ours.predict(PAIRS), original.predict(PAIRS), atol=1e-5)
    with pytest.raises(ConfigError, match="no prompt 'x'; there are 'query'"):
        ours.predict(PAIRS, prompt_name="x")
    ours.default_prompt_name = None  # the model's own default may be called query, too
    with pytest.raises(ConfigError, match="set default_prompt_name, or give prompt_name or prompt"):
        ours.predict(PAIRS)
    np.testing.assert_allclose(ours.predict(PAIRS, prompt=""), original.predict(PAIRS, prompt=""), atol=1e-5)


def test_no_workers_are_started_for_a_prompt_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "_shared", lambda _: pytest.fail("workers are started"))
    with pytest.raises(ConfigError, match="no prompt 'x'; there are none"):
        CrossEncoder("demo", default_prompt_name="x")


def test_nothing_stays_behind_in_redis(ours: CrossEncoder, shared_queue: Server) -> None:
    with nothing_left(shared_queue):
        ours.predict(PAIRS)


def test_an_item_that_is_not_a_pair_is_named(ours: CrossEncoder) -> None:
    with pytest.raises(InputError, match=r"pair 1 is .*, not a query and a passage"):
        ours.predict([("q", "p"), ("q", 3)])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"pair 0 is .*'ab'.*, not a query and a passage"):
        ours.predict(iter(["ab", "cd"]))  # type: ignore[arg-type]  # not the pair of a and b


def test_torch_is_imported_only_for_tensors() -> None:
    code = "import sys; from rankmill import CrossEncoder; assert CrossEncoder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
