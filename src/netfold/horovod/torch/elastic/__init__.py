"""Training that starts over from its last commit when an operation fails.

    @hvd.elastic.run
    def train(state): ...

    train(hvd.elastic.TorchState(model, optimizer, batch=0))

`run` covers failures after which every process lives: a collective that timed out, a connection that broke, ranks that
disagreed. All ranks leave the job, restore their last commit, join again under the same ranks and call the function
again. A process that died is not replaced: the other ranks wait 60 s for it to join, raise RendezvousError and end.
torchrun (`--max-restarts`) then starts all ranks anew, and their state is what the script loads from its own
checkpoint. Ranks cannot be added or removed while a job runs.
"""

from netfold.horovod.torch.elastic.sampler import ElasticSampler
from netfold.horovod.torch.elastic.state import HostsUpdatedInterrupt, ObjectState, State, TorchState, run

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
