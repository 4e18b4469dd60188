"""A task: a small transformer learns to continue the manual that ships with Python, letter by letter."""

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional

LETTERS = 97  # printable ASCII, the line's end, and one for all other characters
CONTEXT = 48


@cache
def manual() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the letters for training, and the last tenth, for testing; [letters] i64 each."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8).astype(np.int64)
    codes = np.where((codes >= 32) & (codes < 127), codes - 32, np.where(codes == 10, 95, 96))
    cut = len(codes) * 9 // 10
    return torch.from_numpy(codes[:cut]), torch.from_numpy(codes[cut:])


class _Transformer(nn.Module):
    WIDTH, HEADS, LAYERS = 64, 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, self.WIDTH)
        self.positions = nn.Embedding(CONTEXT, self.WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.WIDTH,
                self.HEADS,
                4 * self.WIDTH,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(self.LAYERS)
        )
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.positions.weight
        unseen = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=unseen)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Text:
    """The task: 8 passages a rank and step, Adam."""

    BATCH = 8
    TEST = 400

    @staticmethod
    def model() -> nn.Module:
        return _Transformer()

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=3e-3)

    def __init__(self, seed: int, rank: int) -> None:
        self._draw = torch.Generator().manual_seed(1000 * seed + rank)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        return _loss(model, manual()[0], torch.randint(len(manual()[0]) - CONTEXT, (self.BATCH,), generator=self._draw))

    @torch.no_grad()
    def test(self, model: nn.Module) -> dict[str, float]:
        starts = torch.randint(len(manual()[1]) - CONTEXT, (self.TEST,), generator=torch.Generator().manual_seed(1))
        return {"loss": _loss(model, manual()[1], starts).item()}


def _loss(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    passages = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return functional.cross_entropy(model(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())
