"""Before training, check the hosts and the links between them (`netfold doctor check`)."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from netfold.communicator import Communicator, Options
from netfold.console import plain_console
from netfold.diagnostics.preflight import PreflightFacts, apply_rules, check_alone, check_ranks, failed, print_report
from netfold.torch.env_rendezvous import store_host
from netfold.torch.store import TorchStore
from netfold_train.recipe import Recipe


def preflight(recipe: Recipe) -> bool:
    """Check all ranks' hosts; return False if the job would fail. Rank 0 prints what is wrong and what to do.

    The result is the same on every rank, with any backend. Collective over the world.
    """
    gathered = _gathered(recipe)
    findings = apply_rules(gathered)
    fails = failed(findings)
    if dist.get_rank() == 0:
        console = plain_console(stderr=True, highlight=False)
        if findings:
            print_report(console, gathered, findings)
        else:
            hosts = len({facts.boot for facts in gathered.facts})
            console.print(f"{hosts} {'host' if hosts == 1 else 'hosts'} checked, nothing is wrong")
        if fails:
            sentence = "training would fail on these hosts, for the reasons above; run.check = false skips this check"
            print(f"netfold train: {sentence}", file=sys.stderr, flush=True)
    return not fails


def _gathered(recipe: Recipe) -> PreflightFacts:
    if dist.get_world_size() == 1:
        return check_alone(recipe.run.folder)
    # torchrun's agent keeps one store for all restarts of a job.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"netfold/hosts/{attempt}", distributed_c10d._get_default_store())
    # Only links are measured: the ranks do not join the switch.
    with Communicator(
        TorchStore(store),
        dist.get_rank(),
        dist.get_world_size(),
        options=Options(switch=""),
        timeout_s=recipe.run.timeout_s,
        join_timeout_s=recipe.run.timeout_s,
        store_host=store_host(),
    ) as communicator:
        return check_ranks(communicator, recipe.run.folder)
