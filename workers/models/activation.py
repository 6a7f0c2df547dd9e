"""The function from logit to score, as `sentence_transformers.CrossEncoder` would choose it.

A cross-encoder that sentence-transformers 5.4 or later has saved says it in a file of its own, whatever
an older entry of its config.json says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jobs.errors import SpecError
from workers.backends.base import Logits, ModelFiles
from workers.backends.model_file import model_file

Activation = Callable[[Logits], Logits]

_IDENTITY, _SIGMOID = "torch.nn.Identity", "torch.nn.Sigmoid"


def saved_activation(files: ModelFiles) -> str:
    """Dotted path of the function that a model was saved with; without one, the sigmoid's.

    Raises
    ------
    SpecError
        The model is more than a sequence classifier: it has modules of its own, or puts a prompt
        before the texts.
    """
    modules = _read(files, "modules.json", list)
    if modules is not None:  # else sentence-transformers does not read the other file either
        about = _read(files, "config_sentence_transformers.json", dict) or {}
        if about.get("model_type") == "CrossEncoder":
            _check_plain(files, modules, about)
            if about.get("activation_fn") is not None:
                return str(about["activation_fn"])
    entry = getattr(files.config, "sentence_transformers", None) or {}
    older = getattr(files.config, "sbert_ce_default_activation_function", None)
    return str(entry.get("activation_fn", older) or _SIGMOID)


def activation(asked: str, saved: str, model: str) -> Activation:
    """The function to apply to logits of shape ``[rows]``.

    Parameters
    ----------
    asked
        As in `ScoreSpec`.
    saved
        From `saved_activation`.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The model's own function is not one of PyTorch's, or makes no score of a logit.
    """
    path = {"identity": _IDENTITY, "sigmoid": _SIGMOID}.get(asked, saved)
    name = path.rpartition(".")[2] if path.startswith("torch.nn.") else ""
    if name in _OWN:
        return _OWN[name]
    function = _of_torch(name)
    if function is None:
        raise SpecError(f"model {model} names activation {path}, which is none in torch.nn; set --activation")
    return function


def _sigmoid(logits: Logits) -> Logits:
    scores: Logits = np.exp(np.minimum(logits, 0)) / (1 + np.exp(-np.abs(logits)))  # which never overflows
    return scores


_OWN: dict[str, Activation] = {"Identity": lambda logits: logits, "Sigmoid": _sigmoid}
"""Those that need no PyTorch: most models have one of them."""


def _of_torch(name: str) -> Activation | None:
    """A class of `torch.nn` as a function; none if it is no activation."""
    import torch  # takes a second, which workers with another backend can do without

    kind = getattr(torch.nn, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        return None

    def apply(logits: Logits) -> Logits:
        scores: Logits = module(torch.from_numpy(logits)[:, None])[:, 0].numpy()  # as `CrossEncoder` has them
        return scores

    try:
        module = kind().eval()
        sample = apply(np.zeros(3, np.float32))
    except Exception:  # it wants arguments, or something else than logits
        return None
    return apply if sample.shape == (3,) else None


def _check_plain(files: ModelFiles, modules: list[Any], about: dict[str, Any]) -> None:
    kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
    if kinds != ["Transformer"] or modules[0]["path"]:
        raise SpecError(
            f"model {files.source} is made of modules that only sentence-transformers runs "
            f"({', '.join(kinds)}): what can be scored here is one sequence classifier, at the folder's top"
        )
    prompt = about.get("default_prompt_name")
    if prompt and about.get("prompts", {}).get(prompt):
        raise SpecError(
            f"model {files.source} has a default prompt ({prompt}), which is not put before texts here: "
            "put it into the texts and take default_prompt_name out of config_sentence_transformers.json"
        )


def _read(files: ModelFiles, name: str, kind: type[Any]) -> Any:
    """What a JSON file of the model holds, a list or a dict; none if it has no such file."""
    file = model_file(files.source, files.revision, name)
    if file is None:
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, kind):
        raise SpecError(f"model {files.source}: {name} is no {kind.__name__}")
    return found
