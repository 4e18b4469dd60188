"""The aggregator daemon: who may join, with how much memory, and what became of them.

Membership and admission are Python (asyncio, one task a connection); packets never pass through here, they are the
native plane's (`native/dataplane`). May import: `netfold.switch_protocol.control_messages` and the native aggregator,
protocol and transport.

Always: memory is granted before a job starts and never grows; a refusal carries its reason; a job that ends, however
it ends, gives everything back; a job's failure is nobody else's.

Tests: `.venv/bin/pytest tests/switch`
"""

from netfold.switch.daemon import Switch
from netfold.switch.quota import Limits
from netfold.switch.tokens import Tokens

__all__ = ["Limits", "Switch", "Tokens"]
