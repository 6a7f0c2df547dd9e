"""The drop-in agrees with sentence-transformers' CrossEncoder, alone and inside its tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder as Original
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.util import mine_hard_negatives

from rankmill import CrossEncoder
from rankmill.jobs.contract.errors import ConfigError, InputError
from tests.conftest import Server
from tests.harness.models.embeddings import bags
from tests.harness.servers.valkey import nothing_left

pytestmark = pytest.mark.own_precision

PAIRS = [(query, f"moon river {'big ' * (n % 5)}{n}") for n in range(12) for query in ("how far", "big cat")]


@pytest.fixture(scope="module")
def original(tiny_model: Path) -> Original:
    return Original(str(tiny_model), device="cpu")


@pytest.fixture(scope="module")
def ours(shared_queue: Server, tiny_model: Path) -> CrossEncoder:
    return CrossEncoder(str(tiny_model), redis_url=shared_queue.url, precision="fp32", device="cpu")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"convert_to_tensor": True},
    {"convert_to_numpy": False},
    {"activation_fn": torch.nn.Identity()},
    {"activation_fn": torch.nn.Sigmoid()},
    {"activation_fn": torch.nn.Tanh()},
    {"prompt": "query: "},
    {"batch_size": 3, "show_progress_bar": True},
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


def test_rank_agrees(ours: CrossEncoder, original: Original) -> None:
    documents = [passage for _, passage in PAIRS[::2]]
    choices: list[dict[str, Any]] = [{}, {"top_k": 3, "return_documents": True}]
    for options in choices:
        expected = original.rank("how far", documents, **options)
        found = ours.rank("how far", documents, **options)
        assert [each["corpus_id"] for each in found] == [each["corpus_id"] for each in expected]
        assert [each.keys() for each in found] == [each.keys() for each in expected]
        assert [each["score"] for each in found] == pytest.approx(
            [each["score"] for each in expected], abs=1e-5
        )


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
        precision="fp32",
        prompts=prompts,
        default_prompt_name="query",
    )
    np.testing.assert_allclose(ours.predict(PAIRS), original.predict(PAIRS), atol=1e-5)
    with pytest.raises(ConfigError, match="no prompt 'x'; there are 'query'"):
        ours.predict(PAIRS, prompt_name="x")


def test_nothing_stays_behind_in_redis(ours: CrossEncoder, shared_queue: Server) -> None:
    with nothing_left(shared_queue):
        ours.predict(PAIRS)


def test_what_is_not_a_pair(ours: CrossEncoder) -> None:
    with pytest.raises(InputError, match=r"pair 1 is .*, not a query and a passage"):
        ours.predict([("q", "p"), ("q", 3)])
    with pytest.raises(InputError, match=r"pair 0 is .*'ab'.*, not a query and a passage"):
        ours.predict(iter(["ab", "cd"]))  # not the pair of a and b


def test_torch_is_imported_only_for_tensors() -> None:
    code = "import sys; from rankmill import CrossEncoder; assert CrossEncoder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
