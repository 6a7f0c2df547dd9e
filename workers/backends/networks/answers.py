"""The last projection of a language model, for the answers that the score is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Answers(nn.Module):
    """Rows of a language model's last projection, in float32 whatever the rest of the model is.

    The numbers are kept as their bits, as a module's integers are never cast.

    Parameters
    ----------
    whole
        The projection to the whole vocabulary.
    tokens
        Ids of the tokens for yes and, if the score is the log-odds, for no.
    """

    def __init__(self, whole: Any, tokens: tuple[int, int | None]) -> None:
        super().__init__()
        rows = [token for token in tokens if token is not None]
        bias = getattr(whole, "bias", None)
        added = torch.zeros(len(rows)) if bias is None else bias.detach()[rows].float()
        self._weight = nn.Buffer(whole.weight.detach()[rows].float().contiguous().view(torch.int32))
        self._bias = nn.Buffer(added.view(torch.int32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]``, of any dtype, to ``[..., answers]``."""
        weight, bias = self._weight.view(torch.float32), self._bias.view(torch.float32)
        return nn.functional.linear(hidden.float(), weight, bias)
