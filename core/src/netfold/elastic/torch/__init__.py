"""`netfold.elastic` for torch: a training loop whose ranks come and go.

`state` is what a newcomer is sent, `transfer` sends it, `world` runs attempts of steps over the generations' groups.
`netfold.elastic` exports `State` and `World`.
May import: elastic, the rest of `netfold.torch`.

Always: an optimizer changes nothing before its step's vote has passed; every rank holds the whole state.

Tests: `.venv/bin/pytest core/tests/elastic`
"""

from netfold.elastic.torch.state import State
from netfold.elastic.torch.world import World

__all__ = ["State", "World"]
