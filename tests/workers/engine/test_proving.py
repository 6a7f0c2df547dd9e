"""Faults are planted in the code that scores, in what is made of models and in cached copies: none is served.

A plant is either refused with figures, or the scores that are served are sentence-transformers' own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from rankmill import AsyncClient, Client
from rankmill.cluster.exporter import ClusterView, exporter_registry
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.cache import read_json
from rankmill.jobs.contract.errors import SpecError, WorkerError, WrongScores
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.proof import Proof
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.producer.client.runs import ScoringRun
from rankmill.score.score_file import score_file
from rankmill.workers.backends import classifier, first_token
from rankmill.workers.backends.base import DeviceLost, Logits, OutOfMemory
from rankmill.workers.backends.torch import networks
from rankmill.workers.backends.torch.backend import TorchBackend, TorchForward
from rankmill.workers.batches import tokens as batches
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.engine import engine as engines
from rankmill.workers.engine import proving
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proof_time import ProofTime
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host.disk_cache import _digests
from rankmill.workers.models import activation, loading, prompts, tokenizer
from rankmill.workers.models.loading import Loaded
from tests.conftest import Server, StartWorker, run_command, wait_for
from tests.harness.demo_figures import figures
from tests.harness.environ import QUICK_LEASE
from tests.harness.models.backends import require
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_decoder
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.harness.tools import slow_but
from tests.harness.waiting import waiting_jobs
from tests.workers.engine.test_engine import some_pairs
from tests.workers.models.test_padding import make

pytestmark = pytest.mark.own_precision

PAIRS = list(zip(*some_pairs(24), strict=True))

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert") / "model", layers=3, heads=4)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder") / "model"
    return make_decoder(folder, "qwen3", task="causal", template=PAIR_TEMPLATE)


@cache
def own_scores(model: Path) -> Logits:
    scores: Logits = cross_encoder(model).predict(PAIRS, batch_size=1)
    return scores


def in_the_network(patch: Patch, change: Callable[[Any], None]) -> None:
    """Change each model of transformers that a backend loads, before its last layer is replaced."""
    load = vars(networks)["load_pretrained"]

    def changed(*args: Any) -> Any:
        model = load(*args)
        with torch.no_grad():
            change(model)
        return model

    patch.setattr(networks, "load_pretrained", changed)
    patch.setattr(classifier, "load_pretrained", changed)


def in_the_batch(patch: Patch, change: Callable[[batches.Batch], batches.Batch]) -> None:
    put_together = batches.put_together
    patch.setattr(engines, "put_together", lambda *args: change(put_together(*args)))


def in_the_logits(patch: Patch, change: Callable[[Logits], Logits]) -> None:
    result = TorchForward.result
    patch.setattr(TorchForward, "result", lambda self: change(np.array(result(self))))


def no_mask(patch: Patch) -> None:
    in_the_batch(
        patch, lambda each: batches.Batch.padded(each.ids, each.types, np.ones_like(each.mask), each.groups)
    )


def swapped_segments(patch: Patch) -> None:
    def change(each: batches.Batch) -> batches.Batch:
        assert each.types is not None
        return batches.Batch.padded(each.ids, np.where(each.types == 0, 1, 0), each.mask)

    in_the_batch(patch, change)


def lost_segments(patch: Patch) -> None:
    in_the_batch(patch, lambda each: batches.Batch.padded(each.ids, None, each.mask))


def last_column_lost(patch: Patch) -> None:
    in_the_batch(
        patch,
        lambda each: (
            batches.Batch.padded(
                each.ids[:, :-1], None if each.types is None else each.types[:, :-1], each.mask[:, :-1]
            )
            if each.ids.shape[1] > 4
            else each
        ),
    )


def another_activation(patch: Patch) -> None:
    def change(model: Any) -> None:
        for layer in model.bert.encoder.layer:
            layer.intermediate.intermediate_act_fn = torch.nn.ReLU()

    in_the_network(patch, change)


def almost_the_same_activation(patch: Patch) -> None:
    def change(model: Any) -> None:
        for layer in model.bert.encoder.layer:
            layer.intermediate.intermediate_act_fn = torch.nn.GELU(approximate="tanh")

    in_the_network(patch, change)


def shifted_positions(patch: Patch) -> None:
    def change(model: Any) -> None:
        weight = model.bert.embeddings.position_embeddings.weight
        weight.copy_(weight.roll(1, 0))

    in_the_network(patch, change)


def skipped_layer(patch: Patch) -> None:
    def change(model: Any) -> None:
        del model.bert.encoder.layer[1]

    in_the_network(patch, change)


def lost_bias(patch: Patch) -> None:
    in_the_network(patch, lambda model: model.classifier.bias.fill_(0.3))


def norm_with_another_epsilon(patch: Patch) -> None:
    def change(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-3

    in_the_network(patch, change)


def second_token(patch: Patch) -> None:
    def wrong(self: Any, hidden: torch.Tensor, mask: torch.Tensor | None, *_: Any, **__: Any) -> torch.Tensor:
        return right(self, hidden.roll(-1, 1), mask)

    right = first_token._BertLayer.forward
    patch.setattr(first_token._BertLayer, "forward", wrong)


def scale_of_attention(patch: Patch) -> None:
    attend: Any = vars(first_token)["scaled_dot_product_attention"]

    def steeper(*args: Any, **named: Any) -> Any:
        return attend(*args, **{**named, "scale": named["scale"] * 1.1})

    patch.setattr(first_token, "scaled_dot_product_attention", steeper)


def no_number_in_one_lane(patch: Patch) -> None:
    def change(logits: Logits) -> Logits:
        if len(logits) > 3:
            logits[3] = np.nan
        return logits

    in_the_logits(patch, change)


def rows_in_another_order(patch: Patch) -> None:
    in_the_logits(patch, lambda logits: logits[::-1])


def a_row_for_its_neighbour(patch: Patch) -> None:
    def change(logits: Logits) -> Logits:
        if len(logits) > 5:
            logits[[4, 5]] = logits[[5, 4]]
        return logits

    in_the_logits(patch, change)


def scores_of_few_bits(patch: Patch) -> None:
    in_the_logits(patch, lambda logits: (np.round(logits * 256) / 256).astype(np.float32))


def a_shorter_limit(patch: Patch) -> None:
    init = tokenizer.PairTokenizer.__init__
    patch.setattr(
        tokenizer.PairTokenizer,
        "__init__",
        lambda self, one, length, *others: init(self, one, length - 1, *others),
    )


def passage_cut_alone(patch: Patch) -> None:
    patch.setattr(tokenizer.Joiner, "_agrees_with", lambda *_: True)
    patch.setattr(
        tokenizer,
        "longest_first",
        lambda lengths, room: np.stack([lengths[0].clip(max=room), (room - lengths[0]).clip(0, lengths[1])]),
    )


def swapped_texts(patch: Patch) -> None:
    call = tokenizer.PairTokenizer.__call__
    patch.setattr(
        tokenizer.PairTokenizer, "__call__", lambda self, queries, passages: call(self, passages, queries)
    )


def stripped_texts(patch: Patch) -> None:
    call = tokenizer.PairTokenizer.__call__
    patch.setattr(
        tokenizer.PairTokenizer,
        "__call__",
        lambda self, queries, passages: call(self, [each[:60] for each in queries], passages),
    )


def another_score_of_the_same_logit(patch: Patch) -> None:
    patch.setitem(activation._OWN, "Sigmoid", lambda logits: activation._sigmoid(2 * logits))


BERT = {
    plant.__name__: plant
    for plant in (
        no_mask, swapped_segments, lost_segments, last_column_lost, another_activation,
        almost_the_same_activation, shifted_positions, skipped_layer, lost_bias, norm_with_another_epsilon,
        second_token, scale_of_attention, no_number_in_one_lane, rows_in_another_order,
        a_row_for_its_neighbour, scores_of_few_bits, a_shorter_limit, passage_cut_alone, swapped_texts,
        stripped_texts, another_score_of_the_same_logit,
    )
}  # fmt: skip


def lost_tied_weights(patch: Patch) -> None:
    def change(model: Any) -> None:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)

    in_the_network(patch, change)


def lost_ending(patch: Patch) -> None:
    cut = prompts.PromptTokenizer._cut

    def without(self: prompts.PromptTokenizer, tokens: Tokens) -> Tokens:
        ending, self._ending = self._ending, self._ending[:0]
        try:
            return cut(self, tokens)
        finally:
            self._ending = ending

    patch.setattr(prompts.PromptTokenizer, "_cut", without)


def another_answer(patch: Patch) -> None:
    found = vars(loading)["answers"]
    patch.setattr(loading, "answers", lambda *args: found(*args)[::-1])


def no_system_message(patch: Patch) -> None:
    rendered = prompts.PromptTokenizer.rendered

    def cut(self: Any, queries: Any, passages: Any) -> list[str]:
        return [each.replace("Judge. ", "", 1) for each in rendered(self, queries, passages)]

    patch.setattr(prompts.PromptTokenizer, "rendered", cut)


def prefixes_at_other_places(patch: Patch) -> None:
    continued = networks.LanguageModel.continued
    patch.setattr(
        networks.LanguageModel,
        "continued",
        lambda self, ids, mask, of, rest, rest_mask, places: continued(
            self, ids, mask, of, rest, rest_mask, places + 1
        ),
    )


def prefixes_of_other_rows(patch: Patch) -> None:
    continued = networks.LanguageModel.continued
    patch.setattr(
        networks.LanguageModel,
        "continued",
        lambda self, ids, mask, of, *others: continued(self, ids, mask, of.roll(1), *others),
    )


def places_of_one_prefix_for_many(patch: Patch) -> None:
    """In a batch with many prefixes, all rows go on where the longest prefix ends."""
    continued = networks.LanguageModel.continued

    def wrong(self: Any, ids: Any, mask: Any, of: Any, rest: Any, rest_mask: Any, places: Any) -> Any:
        if len(ids) > 12:
            places = places - places[:, :1] + mask.sum(1).max()
        return continued(self, ids, mask, of, rest, rest_mask, places)

    patch.setattr(networks.LanguageModel, "continued", wrong)


DECODER = {
    plant.__name__: plant
    for plant in (
        lost_tied_weights, lost_ending, another_answer, no_system_message, prefixes_at_other_places,
        prefixes_of_other_rows, places_of_one_prefix_for_many,
    )
}  # fmt: skip


def served(model: Path, cache: Path, backend: str = "torch", **spec: Any) -> Proof | None:
    """What was proven of a model that is served, with its own scores; ``None`` if it is refused."""
    wanted = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **spec})
    try:
        loaded = load_proven(wanted, "cpu", backend, str(cache))
    except WorkerError as error:
        if "would not get its own scores" not in str(error):
            raise
        return None
    scored = Engine(loaded.model(wanted), 512).score(*zip(*PAIRS, strict=True))
    assert scored.errors == {}
    np.testing.assert_allclose(scored.scores, own_scores(model), atol=1e-4)
    return loaded.proof


_QUICK = ("no_mask", "swapped_segments", "skipped_layer", "no_number_in_one_lane", "a_shorter_limit")


@pytest.mark.parametrize("plant", slow_but(BERT, *_QUICK))
def test_what_is_planted_is_refused(plant: str, bert: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    assert served(bert, tmp_path / "cache") is not None
    BERT[plant](monkeypatch)
    monkeypatch.setattr(proving, "_release", lambda: "with a fault")
    proof = served(bert, tmp_path / "cache")
    assert proof is None or (plant == "no_mask" and proof.way == "equal")


def put_in_place(kept: Path, other: Path) -> None:
    """Put other files into a folder of the cache, as if they had been made for it."""
    for file in other.iterdir():
        if file.name != "digests.json":
            shutil.copyfile(file, kept / file.name)
    made = {"of": kept.name, "files": _digests(kept, None)}
    (kept / "digests.json").write_text(json.dumps(made))


@pytest.mark.parametrize(
    "copy", slow_but(["openvino openvino", "onnx onnx", "openvino models"], "openvino models")
)
def test_a_cached_copy_of_another_model_is_refused(
    copy: str, bert: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    backend, kind = copy.split()
    require(backend)
    words = ["the"] if kind == "models" else []
    other = make_bert(tmp_path / "other", layers=3, heads=4, seed=1, extra_words=words)
    folders = []
    for model in (bert, other):
        here = tmp_path / f"cache-{model.parent.name}"
        load_proven(ScoreSpec(model=str(model), precision="fp32"), "cpu", backend, str(here))
        folders += [each for each in (here / kind).iterdir() if each.is_dir()]
    kept, foreign = folders
    put_in_place(kept, foreign)
    monkeypatch.setattr(proving, "_release", lambda: "again")
    assert served(bert, kept.parents[1], backend) is None


@pytest.mark.parametrize("plant", slow_but(DECODER, "lost_ending", "places_of_one_prefix_for_many"))
def test_what_is_planted_in_a_language_model_is_refused(
    plant: str, decoder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    proof = served(decoder, tmp_path / "cache")
    assert proof is not None
    assert proof.way == "shared"
    monkeypatch.setattr(proving, "_BATCH_SECONDS", 60)  # however busy this machine is
    DECODER[plant](monkeypatch)
    monkeypatch.setattr(proving, "_release", lambda: "with a fault")
    proof = served(decoder, tmp_path / "cache")
    assert proof is None or ("prefix" in plant and proof.way == "padded")


def breaking(server: Server, workers: StartWorker, broken: Path) -> tuple[subprocess.Popen[bytes], Client]:
    """A worker whose device breaks when a file is there, and a client whose runs have several chunks."""
    options = {"BROKEN": str(broken), "RANKMILL_BACKEND": "torch", **QUICK_LEASE}
    worker = workers(worker_class="tests.harness.misbehaving.BrokenDeviceWorker", environ=options)
    return worker, Client(server.url, precision="fp32", chunk_size=4, window=1)


def breaks(broken: Path, rows: int) -> None:
    """Break the device when a chunk is done, and wait after some wrong scores, so that the probes follow."""
    if rows and not broken.exists():
        broken.touch()
    elif rows >= 16:
        time.sleep(0.6)


def test_a_worker_whose_device_breaks_stops_and_says_so(
    server: Server, workers: StartWorker, bert: Path, tmp_path: Path
) -> None:
    """Shows: a device computes wrong scores."""
    broken = tmp_path / "broken"
    worker, client = breaking(server, workers, broken)
    before = client.submit(PAIRS[:4], model=str(bert))
    np.testing.assert_allclose(before.scores(60), own_scores(bert)[:4], atol=1e-4)
    broken.touch()
    time.sleep(0.6)
    run = client.submit(PAIRS, model=str(bert))
    wait_for(lambda: worker.poll() is not None)
    assert worker.returncode == 1
    said = (tmp_path / "worker.log").read_text()
    why = f"its device gets wrong scores of {bert} now (torch fp32 on cpu, padded: differs by 0.01"
    assert f"scores wrongly, perhaps since {datetime.now(UTC):%Y}" in said
    assert f": {why}" in said
    assert f"score the others again: {before.id}" in said
    assert "Traceback" not in said
    (job,) = waiting_jobs(server.client)  # it is handed back, at once
    assert run.id in job
    (report,) = read_cluster(server.client).last_reports
    assert why in report.reason
    assert report.runs == (before.id,)
    assert why in run_command("rankmill", "status", "--redis", server.url, environ={"COLUMNS": "999"}).out
    registry = exporter_registry(ClusterView(server.client))
    assert registry.get_sample_value("rankmill_workers_stopped") == 1
    workers()
    np.testing.assert_allclose(run.scores(60), own_scores(bert), atol=1e-4)  # it has none of its scores


def test_a_lack_of_memory_says_nothing_of_scores(bert: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """It was kept as a proof of wrong scores, and for a model that served, runs heard of wrong scores."""
    spec, most, submit = ScoreSpec(model=str(bert), precision="fp32"), [0], TorchBackend.submit

    def submit_what_fits(self: TorchBackend, batch: batches.Batch) -> TorchForward:
        if batch.ids.size > most[0]:
            raise OutOfMemory("others have it")
        return submit(self, batch)

    monkeypatch.setattr(TorchBackend, "submit", submit_what_fits)
    monkeypatch.setattr(proving, "_BATCH_SECONDS", 60)  # however busy this machine is
    with pytest.raises(OutOfMemory, match="others have it"):
        load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    most[0] = 3000
    loaded = load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    assert loaded.proof
    assert loaded.proof.tokens == 2048  # half of 4,096 did not fit, and was not scored in halves
    assert loaded.prove_batch
    with pytest.raises(OutOfMemory, match="others have it"):
        loaded.prove_batch(1, 3500)
    engine = Engine(loaded.model(spec), 512)
    most[0] = 0
    with pytest.raises(DeviceLost, match="no memory is left for the model's probes: others have it"):
        engine.prove()
    most[0] = 1000
    engine.prove()


def change(model: Path, name: str, to: float) -> None:
    weights = load_file(model / "model.safetensors")
    weights[name][0, 0] = to
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def no_tokenizer(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()


def a_word_without_an_embedding(model: Path) -> None:
    about = json.loads((model / "tokenizer.json").read_text())
    about["model"]["vocab"]["zebra"] = 10_000  # no probe has it
    (model / "tokenizer.json").write_text(json.dumps(about))


OWN_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (no_tokenizer, "knows no words: are its files missing"),
    "vocabulary": (a_word_without_an_embedding, "its words have numbers up to 10,000, and the model has"),
    "no number": (
        lambda model: change(model, "bert.encoder.layer.0.output.dense.weight", float("nan")),
        "its output is not a number: its weights are damaged",
    ),
    "infinite": (
        lambda model: change(model, "classifier.weight", float("inf")),
        "its output is not a number",
    ),
}
"""Faults that the reference shares; of weights that are missing or foreign, see test_loading.py."""


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_a_fault_in_the_models_own_directory_is_refused(fault: str, tmp_path: Path) -> None:
    plant, message = OWN_FAULTS[fault]
    plant(make_bert(tmp_path / "model"))
    with pytest.raises(SpecError, match=message):
        served(tmp_path / "model", tmp_path / "cache")


@pytest.mark.parametrize("parts", slow_but([None, 8], None))
def test_a_file_that_a_broken_device_has_scored_ends_and_is_started_over(
    parts: int | None, server: Server, workers: StartWorker, bert: Path, tmp_path: Path
) -> None:
    """Shows: a device computes wrong scores."""
    worker, _ = breaking(server, workers, broken := tmp_path / "broken")
    source, output = tmp_path / "a.parquet", tmp_path / ("out" if parts else "out.parquet")
    pq.write_table(pa.table(dict(zip(("query", "passage"), zip(*PAIRS, strict=True), strict=True))), source)
    flags = {"redis_url": server.url, "model": str(bert), "precision": "fp32", "chunk_size": 4, "window": 1}
    request = FileRequest(inputs=(str(source),), output=str(output), rows_per_part=parts)

    @contextmanager
    def view(rows: int) -> Iterator[Any]:
        yield lambda progress, *_: breaks(broken, progress.rows)

    told = r"scores of this output are wrong: worker .+ scores wrongly, .+; start over with --restart"
    with pytest.raises(WrongScores, match=told) as ended:
        score_file(request, load_settings(flags), view=view)
    assert "the same command continues" not in str(getattr(ended.value, "__notes__", []))
    assert worker.wait(60) == 1
    server.client.flushall()  # the journal remembers it, too
    workers()
    with pytest.raises(WrongScores, match=told):
        score_file(request, load_settings(flags))
    assert not output.exists() or parts
    score_file(request.model_copy(update={"restart": True}), load_settings(flags))
    np.testing.assert_allclose(pq.read_table(output)["score"].to_pylist(), own_scores(bert), atol=1e-4)


@pytest.mark.parametrize("how", ["live", "asyncio"])
def test_a_run_that_a_broken_device_has_scored_in_part_ends(
    how: str, server: Server, workers: StartWorker, bert: Path, tmp_path: Path
) -> None:
    _, client = breaking(server, workers, broken := tmp_path / "broken")
    rows = count(1)

    def read() -> None:
        for _ in client.submit(PAIRS, model=str(bert)):
            breaks(broken, next(rows))

    async def read_async() -> None:
        async with AsyncClient(server.url, precision="fp32", chunk_size=4, window=1) as own:
            async for _ in await own.submit(PAIRS, model=str(bert)):
                breaks(broken, next(rows))

    told = r"scores of run .+ are wrong: worker .+ scores wrongly, perhaps since .+; score it again"
    with pytest.raises(WrongScores, match=told):
        read() if how == "live" else asyncio.run(read_async())


def test_whoever_collects_a_detached_run_hears_of_wrong_scores(
    server: Server, workers: StartWorker, bert: Path, tmp_path: Path
) -> None:
    """Shows: a device computes wrong scores."""
    worker, client = breaking(server, workers, broken := tmp_path / "broken")
    run = client.submit(PAIRS, model=str(bert), detached=True)
    run.scores(60)
    broken.touch()
    time.sleep(0.6)
    client.submit(PAIRS, model=str(bert))
    assert worker.wait(60) == 1
    for _ in range(2):
        again = client.attach(run.id)
        assert isinstance(again, ScoringRun)
        with pytest.raises(WrongScores, match=f"scores of run {run.id} are wrong"):
            again.scores(60)


OTHERS: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 16},
    "MPNet": {},
    "Deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "BigBird": {"attention_type": "original_full"},
    "Longformer": {"attention_window": 16},
    "Nystromformer": {},
}


@pytest.mark.parametrize("backend", slow_but(["openvino", "onnx"], "openvino"))
@pytest.mark.parametrize("family", slow_but(OTHERS, "DebertaV2"))
def test_other_families_are_scored_by_graphs_too_or_refused(
    family: str, backend: str, tmp_path: Path
) -> None:
    require(backend)
    model = make(family, tmp_path / "model", **OTHERS[family])
    proof = served(model, tmp_path / "cache", backend)
    assert (proof is None) == (family == "Longformer")  # its graph is of one length
    assert proof is None or proof.way == ("equal" if family == "Nystromformer" else "padded")


def test_several_outputs_are_scored_by_a_graph_too(tmp_path: Path) -> None:
    require("openvino")
    model = make_bert(tmp_path / "model", labels=3)
    spec = ScoreSpec(model=str(model), precision="fp32", all_labels=True)
    loaded = load_proven(spec, "cpu", "openvino", str(tmp_path / "cache"))
    scores = Engine(loaded.model(spec), 512).score(*zip(*PAIRS, strict=True)).scores
    np.testing.assert_allclose(scores, own_scores(model), atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_how_long_a_first_proof_takes_is_told_once_that_is_known(tmp_path: Path, precision: str) -> None:
    spec = ScoreSpec.model_validate({"model": str(make_bert(tmp_path / "model")), "precision": precision})
    told: list[str] = []

    def load() -> Loaded:
        return load_proven(
            spec, "cpu", "torch", str(tmp_path / "cache"), on_proof=lambda time: told.append(str(time))
        )

    loaded = load()
    assert told[0] == ""
    assert told[1].startswith(": at least ")
    assert told[-1].startswith(": about ")
    told.clear()
    load()
    assert told == [""]  # it has been proven
    assert loaded.prove_again
    loaded.prove_again()
    assert told == [""]


def test_a_proof_s_time_adds_that_of_transformers_and_of_own_batches(monkeypatch: Patch) -> None:
    """Both by their tokens; a forward costs 32 tokens more than it has."""
    now, told = [100.0], list[str]()
    monkeypatch.setattr(system, "monotonic", lambda: now[0])
    proof = ProofTime(lambda proof: told.append(str(proof)))
    now[0] += 4  # the reference model is loaded
    for tokens in proof.each(costs := [268, *[18] * 6], costs):
        now[0] += (tokens + 32) / 60  # 5 s, then 50 ms each
        if tokens == 268:
            assert not told
    assert told == [": at least 15 s"]  # 4 + 5 + 6 * 0.83
    now[0] += 8  # until the worker's own half begins
    assert str(proof) == ": at least 25 s"
    own = proof.each(range(10), [68] * 10, then=2)
    next(own)
    now[0] += 2
    next(own)
    assert str(proof) == ": about 45 s"  # 22 + 10 * 2 + 2
    now[0] += 38
    assert str(proof) == ": longer than the 45 s expected, 62 s so far"
    next(own)
    assert told[1:] == [": about 45 s", ": about 4 min"]  # 40 s for two of ten batches
    for _ in own:
        pass
    assert told[-1] == ": about 65 s"


def test_the_demo_model_ships_with_what_transformers_makes_of_it(tmp_path: Path, monkeypatch: Patch) -> None:
    shipped = proving.Shipped.model_validate(read_json(proving.DEMO_FIGURES))
    now = figures()
    assert (shipped.of, shipped.own.tokens) == (now.of, now.own.tokens), (
        "python -m tests.harness.demo_figures"
    )
    np.testing.assert_allclose(shipped.own.logits, now.own.logits, atol=1e-4)
    monkeypatch.setattr(proving.Proving, "asked", None)  # nobody asks transformers
    for precision in ("fp32", "bf16"):
        spec = ScoreSpec.model_validate({"model": "demo", "precision": precision})
        assert load_proven(spec, "cpu", "torch", str(tmp_path)).proof is not None


def test_the_demo_model_is_held_to_its_own_figures(tmp_path: Path, monkeypatch: Patch) -> None:
    skipped_layer(monkeypatch)
    with pytest.raises(WorkerError, match="would not get its own scores"):
        load_proven(ScoreSpec(model="demo", precision="fp32"), "cpu", "torch", str(tmp_path))


def test_a_proof_of_wrong_scores_is_not_believed_for_ever(tmp_path: Path, monkeypatch: Patch) -> None:
    """With a broken device replaced by another one of its kind, the host still refused the model."""
    spec = ScoreSpec(model="demo", precision="fp32")
    with monkeypatch.context() as patch:
        skipped_layer(patch)
        with pytest.raises(WorkerError, match="would not get its own scores"):
            load_proven(spec, "cpu", "torch", str(tmp_path))
    with pytest.raises(WorkerError, match="would not get its own scores"):
        load_proven(spec, "cpu", "torch", str(tmp_path))
    for file in tmp_path.glob("proofs/*.json"):
        os.utime(file, (0, 0))
    loaded = load_proven(spec, "cpu", "torch", str(tmp_path))
    assert loaded.proof
    assert loaded.proof.way == "padded"
