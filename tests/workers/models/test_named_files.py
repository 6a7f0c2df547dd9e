"""Files that a model names itself: they are part of its content, wherever they lie, or refused."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill.extensions.registry.push import find_files
from rankmill.jobs.contract.errors import InputError, SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.model_files import model_content, model_files
from rankmill.producer.files.manifest import content_here
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from rankmill.workers.models.reference import ReferenceModel
from tests.harness.models.hub import COMMIT, fetched
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_chain, make_decoder, make_encoder
from tests.harness.models.tiny import make_bert, put_weights

PAIRS = ["how far", "why"], ["a cat and the moon", "the big river"]


def spec_of(model: Path) -> ScoreSpec:
    return ScoreSpec(model=str(model), precision="fp32", activation="identity")


def score(model: Path, backend: str = "torch") -> np.ndarray:
    loaded = load_model(spec_of(model), "cpu", backend, str(model.with_name("cache")))
    return Engine(loaded, 512).score(*PAIRS).scores


def edit(file: Path, **entries: object) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **entries}))


def by_index(model: Path, file: str) -> Path:
    return put_weights(model, file)


def by_config(model: Path, file: str) -> Path:
    """The config names an index, and that names the weights."""
    edit(model / "config.json", transformers_weights=".all.safetensors.index.json")
    return put_weights(model, file, ".all.safetensors.index.json")


def behind_a_link(model: Path, file: str) -> Path:
    """The folder of the weights is a link to one beside the model."""
    put_weights(model, file).parent.rename(model.with_name("weights"))
    (model / file).parent.symlink_to(model.with_name("weights"))
    return model.with_name("weights") / Path(file).name


@pytest.mark.parametrize(
    ("put", "file"),
    [
        (by_index, ".weights/one.safetensors"),
        (by_index, "checkpoint-5/one.safetensors"),
        (by_index, "a/__pycache__/.one.safetensors"),
        (by_index, "./parts//one.safetensors"),
        (by_config, "parts/.one.safetensors"),
        (behind_a_link, "parts/one.safetensors"),
        (behind_a_link, ".parts/one.safetensors"),
    ],
)
def test_weights_count_wherever_they_lie(put: Callable[[Path, str], Path], file: str, tmp_path: Path) -> None:
    old, new = (make_bert(tmp_path / str(seed), seed=seed) for seed in range(2))
    wanted = [score(old), score(new)]
    model = shutil.copytree(old, tmp_path / "model")
    place = put(model, file)
    before = model_content(model)
    for backend in ("torch", "openvino"):
        np.testing.assert_allclose(score(model, backend), wanted[0], atol=1e-5)
    shutil.copyfile(new / "model.safetensors", place)
    assert model_content(model) != before
    for backend in ("torch", "openvino"):  # whose graph is kept
        np.testing.assert_allclose(score(model, backend), wanted[1], atol=1e-5)


def test_a_registry_has_all_files_that_a_model_needs_or_none(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model")
    put_weights(model, "checkpoint-5/one.safetensors")
    assert "checkpoint-5/one.safetensors" in {file.path for file in find_files(model)}
    (model / "checkpoint-5").rename(model / ".weights")
    edit(model / "model.safetensors.index.json", weight_map={"a": ".weights/one.safetensors"})
    with pytest.raises(
        InputError, match=r"its files name '.weights/one.safetensors', and a registry holds no"
    ):
        find_files(model)


def modules(width: int) -> list[Any]:
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling

    dense = Dense(width, 1, activation_function=None, module_output_name="scores")
    return [Pooling(width, "mean"), dense]


def test_modules_count_wherever_they_lie(tmp_path: Path) -> None:
    model = make_chain(tmp_path / "model", "bert", modules)
    wanted, before = score(model), model_content(model)
    saved = json.loads((model / "modules.json").read_text())
    (model / saved[2]["path"]).rename(model / ".dense")
    saved[2]["path"] = ".dense"
    (model / "modules.json").write_text(json.dumps(saved))
    np.testing.assert_allclose(score(model), wanted, atol=1e-5)
    contents = {before, model_content(model)}
    for file in (".dense/config.json", ".dense/model.safetensors"):
        (model / file).write_bytes((model / file).read_bytes() + b" ")
        contents.add(model_content(model))
    assert len(contents) == 4


def index(model: Path, name: str) -> None:
    put_weights(model, "one.safetensors")
    edit(model / "model.safetensors.index.json", weight_map={"classifier.bias": name})


def config(model: Path, name: str) -> None:
    edit(model / "config.json", transformers_weights=name)


def versions(model: Path, name: str) -> None:
    edit(model / "config.json", configuration_files=["config.json", name])


def tokenizers(model: Path, name: str) -> None:
    edit(model / "tokenizer_config.json", fast_tokenizer_files=[name])


def module(model: Path, name: str) -> None:
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": name}]))


@pytest.mark.parametrize("place", [index, config, versions, tokenizers, module])
@pytest.mark.parametrize("name", ["{}/0/{}", "../0/{}", "a/../../0/{}", "/nowhere/{}", "../nowhere/{}"])
def test_a_name_that_leads_out_of_the_model_is_refused(
    place: Callable[[Path, str], None], name: str, tmp_path: Path
) -> None:
    """Also where nothing is there: a refusal does not tell whether there is."""
    make_bert(tmp_path / "0")
    model = make_bert(tmp_path / "model", seed=1)
    files = {"config": "model.safetensors", "index": "model.safetensors", "module": "1_Dense"}
    named = name.format(*[tmp_path] * name.startswith("{"), files.get(place.__name__, "x.4.0.0.json"))
    place(model, named)
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (SpecError, lambda: score(model)),
        (SpecError, lambda: model_content(model)),
        (InputError, lambda: content_here(str(model), tmp_path / "cache")),
        (InputError, lambda: find_files(model)),
    ]
    for kind, ask in refused:
        with pytest.raises(kind, match="which is not in its directory: copy or link") as said:
            ask()
        assert repr(named)[:90] in str(said.value)


@pytest.mark.parametrize("place", [index, config, versions, tokenizers, module])
def test_a_model_on_the_hub_names_no_file_of_this_host(
    place: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit says nothing of that file, which another host may have, too."""
    other = make_bert(tmp_path / "other")
    folder = make_bert(fetched(tmp_path, monkeypatch), seed=1)
    spec = ScoreSpec(model="some/model", precision="fp32")
    assert load_model(spec, "cpu", "torch", str(tmp_path / "cache")).revision == COMMIT
    place(folder, str(other / "model.safetensors"))
    with pytest.raises(SpecError, match="which is not in its directory"):
        load_model(spec, "cpu", "torch", str(tmp_path / "another-cache"))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(SpecError, match="some/model has a LoRA adapter"):
        load_model(spec, "cpu", "torch", str(tmp_path / "another-cache"))


def test_the_size_of_a_model_in_several_files_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its config describes was made in memory first, and then refused."""
    folder = make_bert(fetched(tmp_path, monkeypatch))
    put_weights(folder, "model-00001-of-00001.safetensors")
    spec = ScoreSpec(model="some/model", precision="fp32")
    assert load_model(spec, "cpu", "torch", str(tmp_path / "cache")).revision == COMMIT
    edit(folder / "config.json", num_hidden_layers=200)
    with pytest.raises(SpecError, match=r"parameters, but its config\.json describes|describes more than"):
        load_model(spec, "cpu", "torch", str(tmp_path / "another-cache"))


@pytest.mark.parametrize("place", [index, config])
def test_weights_of_other_formats_are_not_loaded_by_any_name(
    place: Callable[[Path, str], None], tmp_path: Path
) -> None:
    import torch

    model = make_bert(tmp_path / "model")
    torch.save({}, model / "adapter_model.bin")
    place(model, "adapter_model.bin")
    with pytest.raises(SpecError, match=r"'adapter_model.bin': save the model with safe_serialization=True"):
        score(model)


def test_the_files_of_the_tokenizer_are_the_model_s(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model")
    wanted = score(model)
    other = make_bert(tmp_path / "other", extra_words=["cat and", "rive"], seed=1)
    edit(
        model / "tokenizer_config.json",
        tokenizer_file=str(other / "tokenizer.json"),
        vocab_file="/etc/passwd",
    )
    np.testing.assert_allclose(score(model), wanted, atol=1e-5)


def test_an_adapter_is_said_to_be_one(tmp_path: Path) -> None:
    """Without its model, and beside it: then what is loaded would depend on whether peft is installed."""
    model = make_bert(tmp_path / "model")
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    for _ in range(2):
        with pytest.raises(SpecError, match=r"has a LoRA adapter .*peft's merge_and_unload\(\), save that"):
            score(model)
        (model / "config.json").unlink(missing_ok=True)


LIBC = ctypes.CDLL(None, use_errno=True)
OPENED, FOLDER = 0x20, 0x40000000


@contextmanager
def watched(folder: Path) -> Iterator[set[str]]:
    """The files below a folder that any library opens meanwhile, known at the end."""
    queue = LIBC.inotify_init1(os.O_NONBLOCK)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    numbers = {LIBC.inotify_add_watch(queue, os.fsencode(path), OPENED): path for path in folders}
    opened: set[str] = set()
    try:
        yield opened
        while True:
            try:
                events = os.read(queue, 1 << 20)
            except BlockingIOError:
                break
            while events:
                number, mask, _, length = np.frombuffer(events[:16], np.int32).tolist()
                name = os.fsdecode(events[16 : 16 + length].rstrip(b"\0"))
                if not mask & FOLDER:
                    opened.add((numbers[number] / name).relative_to(folder).as_posix())
                events = events[16 + length :]
    finally:
        os.close(queue)


def sharded(folder: Path) -> Path:
    put_weights(make_bert(folder), ".weights/one.safetensors")
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "sharded": sharded,
    "sentencepiece": lambda folder: make_encoder(folder, "xlm-roberta"),
    "chain": lambda folder: make_chain(folder, "bert", modules),
    "causal": lambda folder: make_decoder(folder, "qwen3", task="causal", template=PAIR_TEMPLATE),
}


@pytest.mark.skipif(not hasattr(LIBC, "inotify_init1"), reason="Linux tells who opens files")
@pytest.mark.parametrize("kind", MODELS)
def test_all_that_is_opened_is_in_the_digest(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind](tmp_path / "model")
    for file in (".hidden.json", "README.md", "pytorch_model.bin", "checkpoint-5/config.json", ".git/HEAD"):
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_text("{}")
    with watched(model) as opened:
        loaded = load_model(spec_of(model), "cpu", "torch", str(tmp_path / "cache"))
        Engine(loaded, 512).score(*PAIRS)
        ReferenceModel(spec_of(model), model, loaded.revision).close()
    assert {"config.json", "tokenizer.json"} < opened
    assert opened <= set(model_files(model))
