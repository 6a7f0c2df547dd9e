"""The function from logit to score, chosen as `sentence_transformers.CrossEncoder` does.

sentence-transformers 5.4 and later save it in a separate file, which takes precedence over an older entry
in config.json.
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
    """Dotted path of the function that a model was saved with; the sigmoid if it has none.

    Raises
    ------
    SpecError
        The model is not a plain sequence classifier: it has additional modules, or a default prompt.
    """
    modules = _read(files, "modules.json", list)
    if modules is not None:  # without it, sentence-transformers does not read the other file either
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
        The activation of the `ScoreSpec`.
    saved
        From `saved_activation`.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The model's own function is not in `torch.nn`, or does not map a logit to a score.
    """
    path = {"identity": _IDENTITY, "sigmoid": _SIGMOID}.get(asked, saved)
    name = path.rpartition(".")[2] if path.startswith("torch.nn.") else ""
    if name in _OWN:
        return _OWN[name]
    function = _of_torch(name)
    if function is None:
        raise SpecError(
            f"model {model} names activation {path}, which torch.nn does not have; set --activation"
        )
    return function


def _sigmoid(logits: Logits) -> Logits:
    scores: Logits = np.exp(np.minimum(logits, 0)) / (1 + np.exp(-np.abs(logits)))  # never overflows
    return scores


_OWN: dict[str, Activation] = {"Identity": lambda logits: logits, "Sigmoid": _sigmoid}
"""Functions without PyTorch; most models use one of them."""


def _of_torch(name: str) -> Activation | None:
    """A class of `torch.nn` as a function; ``None`` if it is not an activation."""
    import torch  # takes a second, so only if it is needed

    kind = getattr(torch.nn, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        return None

    def apply(logits: Logits) -> Logits:
        scores: Logits = module(torch.from_numpy(logits)[:, None])[:, 0].numpy()  # shape as in `CrossEncoder`
        return scores

    try:
        module = kind().eval()
        sample = apply(np.zeros(3, np.float32))
    except Exception:  # the class needs arguments, or other input than logits
        return None
    return apply if sample.shape == (3,) else None


def _check_plain(files: ModelFiles, modules: list[Any], about: dict[str, Any]) -> None:
    kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
    if kinds != ["Transformer"] or modules[0]["path"]:
        raise SpecError(
            f"model {files.source} has modules that only sentence-transformers runs ({', '.join(kinds)}): "
            "use a model that is one sequence classifier, in the top folder"
        )
    prompt = about.get("default_prompt_name")
    if prompt and about.get("prompts", {}).get(prompt):
        raise SpecError(
            f"model {files.source} has a default prompt ({prompt}), which rankmill does not add to texts: "
            "put it into the texts and remove default_prompt_name from config_sentence_transformers.json"
        )


def _read(files: ModelFiles, name: str, kind: type[Any]) -> Any:
    """The content of a JSON file of the model, a list or a dict; ``None`` if there is no such file."""
    file = model_file(files.source, files.revision, name)
    if file is None:
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, kind):
        raise SpecError(f"model {files.source}: {name} is not a JSON {kind.__name__}")
    return found
