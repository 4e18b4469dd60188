"""The aggregator daemon: admission, memory grants, and the lifecycle of jobs.

  daemon           Switch: start, drain, stop, status
  acceptor         its two ports: connections until they are authenticated
  control_session  one connection: a worker, or a peer that requests `path` or `quota`
  admission        which worker may join which job
  job_lifecycle    a job from its assembly to its end
  tree_session     the parent's side of a job: this switch as a worker of its parent
  ledger, quota    memory and slots, by tenant
  bmv2             a P4 pipeline that reduces in place of the native data plane; thrift_client talks to it

Control is Python (asyncio, one task a connection). Packets never pass through it: the native data plane
(`core/native/dataplane`) handles them. May import netfold.switch_protocol and the native extension.

Invariants: memory is granted before a job starts and never grows. A refusal carries its reason. A job releases
everything when it ends, for whatever reason. A job's failure affects no other job.

Tests: `.venv/bin/pytest core/tests/switch`
"""

from netfold.switch.daemon import Switch
from netfold.switch.quota import Limits
from netfold.switch.tokens import Tokens

__all__ = ["Limits", "Switch", "Tokens"]
