"""The named scopes of `search`, of the search over recovery, and of those over an elastic job's members."""

from netfold_lab.model_check import Scope
from netfold_lab.model_check.agreement import AgreementScope
from netfold_lab.model_check.generation_process import GenerationsScope
from netfold_lab.model_check.recovery_rank import RecoveryScope

# Searched by `make test`, in seconds. The comments say what each scope covers.
QUICK = {
    # A slot is used three times, and kept results are requested.
    "one-slot-pair": Scope(workers=2, window=1, operations="6"),
    # Operations follow each other through the window, called at any time.
    "streamed": Scope(workers=2, window=2, operations="2,1,3"),
    "three": Scope(workers=3, window=1, operations="4"),
    # Packets and workers of an earlier generation, also of two earlier ones.
    "restarted": Scope(workers=2, window=1, operations="3", restarts=1),
    "restarted-twice": Scope(workers=2, window=1, operations="3", restarts=2, network="merged"),
    # The last worker calls another operation: at once, after a sum, or while the other workers send.
    "disagreed": Scope(workers=3, window=1, operations="1,2", last="1,1,1"),
    "disagreed-streamed": Scope(workers=2, window=2, operations="1,2,1", last="1,1,2"),
    "disagreed-restarted": Scope(workers=2, window=1, operations="1,1", last="2", restarts=1),
    # Another job's packets change nothing.
    "foreign": Scope(workers=2, window=1, operations="4", foreign_packets=1),
    # Leaves and a root: each slot is used twice, and sums and results are requested again on both links.
    "leaf-pair": Scope(workers=2, leaves="1,1", window=1, operations="5"),
    "leaf-of-two": Scope(workers=3, leaves="2,1", window=1, operations="4"),
    "leaves-streamed": Scope(workers=2, leaves="1,1", window=2, operations="2,2"),
    "leaves-exact": Scope(workers=2, leaves="1,1", window=1, operations="1", network="exact"),
    # Below leaves: a worker that calls another operation, at its own leaf or at another; another job's packets on both
    # links; group, root or a leaf restart while the old leaves and workers still send.
    "leaves-disagreed": Scope(workers=3, leaves="2,1", window=1, operations="1,2", last="1,1,1"),
    "leaf-disagreed": Scope(workers=3, leaves="1,2", window=1, operations="1,1", last="2"),
    "leaves-foreign": Scope(workers=3, leaves="2,1", window=1, operations="3", foreign_packets=1),
    "leaf-lost": Scope(workers=2, leaves="1,1", window=1, operations="2", restarts=1),
    "leaf-lost-twice": Scope(workers=2, leaves="1,1", window=1, operations="1", restarts=2, network="merged"),
    "leaves-everything": Scope(
        workers=3, leaves="2,1", window=1, operations="1,1", last="2", foreign_packets=1, restarts=1, network="merged"
    ),
    # With packet numbers: the switch names missing packets, and workers detect missing results.
    "numbered": Scope(workers=2, window=2, operations="2", numbers=8, timeouts=1),
    "numbered-streamed": Scope(workers=1, window=2, operations="2,2", numbers=8, timeouts=1),
    "numbered-two-later": Scope(workers=1, window=3, operations="3", numbers=4, timeouts=1),
    # Numbers start again with each generation, while NACKs and packets of the generation before are in flight.
    "numbered-restarted": Scope(workers=2, window=2, operations="2", numbers=8, restarts=1),
    "numbered-restarted-asked": Scope(workers=1, window=2, operations="2", numbers=8, timeouts=1, restarts=1),
    # With a leaf, whose sender gets its parent's results and NACKs.
    "numbered-leaf": Scope(workers=1, leaves="1", window=2, operations="3", numbers=8),
    "numbered-leaf-asked": Scope(workers=1, leaves="1", window=2, operations="2", numbers=8, timeouts=1),
    "numbered-leaf-lost": Scope(workers=1, leaves="1", window=2, operations="2", numbers=8, restarts=1),
    # The hardware profile. Without numbers netfold.p4 is the switch of the scopes above; with numbers it has no NACKs.
    "pipeline": Scope(workers=2, window=2, operations="2", numbers=8, timeouts=1, pipelines="root"),
    "pipeline-streamed": Scope(workers=1, window=2, operations="2,2", numbers=8, timeouts=1, pipelines="root"),
    "pipeline-window-of-three": Scope(workers=1, window=3, operations="3", numbers=4, timeouts=1, pipelines="root"),
    "pipeline-restarted": Scope(workers=2, window=2, operations="2", numbers=8, restarts=1, pipelines="root"),
    # The control plane dies, and another switch comes up: the old pipeline answers the old generation beside it.
    "pipeline-outlives": Scope(workers=2, window=1, operations="3", restarts=1, pipelines="root", outlives=1),
    "pipeline-outlives-disagreed": Scope(operations="1,1", last="2", restarts=1, pipelines="root", outlives=1),
    # Trees with a pipeline: as a leaf, which ignores the NACKs of a root in software; as the root; as both.
    "pipeline-leaf": Scope(workers=1, leaves="1", window=2, operations="3", numbers=8, pipelines="0"),
    "pipeline-leaf-asked": Scope(workers=1, leaves="1", window=2, operations="2", numbers=8, timeouts=1, pipelines="0"),
    "pipeline-leaf-lost": Scope(workers=1, leaves="1", window=2, operations="2", numbers=8, restarts=1, pipelines="0"),
    "pipeline-beside-a-leaf": Scope(leaves="1,1", window=1, operations="2", numbers=8, timeouts=1, pipelines="0"),
    "pipeline-root": Scope(workers=1, leaves="1", window=2, operations="3", numbers=8, pipelines="root"),
    "pipeline-root-asked": Scope(
        workers=1, leaves="1", window=2, operations="2", numbers=8, timeouts=1, pipelines="root"
    ),
    "pipeline-root-lost": Scope(
        workers=1, leaves="1", window=2, operations="2", numbers=8, restarts=1, pipelines="root"
    ),
    "pipelines": Scope(leaves="1,1", window=1, operations="2", numbers=8, timeouts=1, pipelines="root,0,1"),
    # netfold_tna.p4: a slot moves on before its bitmap is read. Chunk numbers are as long as their bits allow.
    "tofino": Scope(workers=3, window=1, operations="4", pipelines="root", chunk_bits=3),
    "tofino-streamed": Scope(workers=2, window=2, operations="2,1,3", pipelines="root", chunk_bits=4),
    "tofino-restarted": Scope(workers=2, window=1, operations="3", restarts=1, pipelines="root", chunk_bits=3),
    "tofino-outlives": Scope(operations="3", restarts=1, pipelines="root", chunk_bits=3, outlives=1),
    "tofino-disagreed": Scope(workers=3, operations="1,2", last="1,1,1", pipelines="root", chunk_bits=3),
    "tofino-disagreed-streamed": Scope(window=2, operations="1,2,1", last="1,1,2", pipelines="root", chunk_bits=4),
    "tofino-disagreed-restarted": Scope(operations="1,1", last="2", restarts=1, pipelines="root", chunk_bits=3),
    "tofino-foreign": Scope(workers=2, operations="4", foreign_packets=1, pipelines="root", chunk_bits=3),
    "tofino-numbered": Scope(
        workers=2, window=2, operations="2", numbers=8, timeouts=1, pipelines="root", chunk_bits=4
    ),
    "tofino-exact": Scope(workers=2, operations="2", network="exact", pipelines="root", chunk_bits=3),
    # Trees with a Tofino: all of its switches, a leaf under a root in software, a root over leaves in software.
    "tofino-leaves": Scope(workers=3, leaves="2,1", operations="3", pipelines="root,0,1", chunk_bits=3),
    "tofino-leaf": Scope(leaves="1,1", operations="3", pipelines="0", chunk_bits=3),
    "tofino-root": Scope(leaves="1,1", operations="3", pipelines="root", chunk_bits=3),
    "tofino-leaf-lost": Scope(leaves="1,1", operations="2", restarts=1, pipelines="0", chunk_bits=3),
    "tofino-leaf-disagreed": Scope(workers=3, leaves="1,2", operations="1,1", last="2", pipelines="0", chunk_bits=3),
    "tofino-leaf-numbered": Scope(
        workers=1, leaves="1", window=2, operations="3", numbers=8, pipelines="0", chunk_bits=4
    ),
    # A worker that contributes whatever chunk it likes: the other workers' sums stay right and alike.
    "rogue": Scope(workers=3, window=1, operations="2", rogue=1),
    "tofino-rogue": Scope(workers=3, operations="2", network="merged", pipelines="root", chunk_bits=3, rogue=1),
    # A network that takes and copies packets, as real ones do; the other views are compared with it.
    "exact": Scope(workers=2, window=1, operations="3", network="exact"),
}

# Searched by `make model-check`, after those above.
LARGE = {
    "exact-restarted": Scope(workers=2, window=1, operations="1", restarts=2, network="exact"),
    "wide": Scope(workers=3, window=2, operations="6"),
    "restarted-twice-monotone": Scope(workers=2, window=1, operations="3", restarts=2),
    "three-restarted": Scope(workers=3, window=1, operations="4", restarts=1),
    "three-restarted-twice": Scope(workers=3, window=1, operations="4", restarts=2, network="merged"),
    "three-streamed-restarted-twice": Scope(workers=3, window=1, operations="2,2", restarts=2, network="merged"),
    "wide-restarted-twice": Scope(workers=2, window=2, operations="6", restarts=2, network="merged"),
    "disagreed-wide": Scope(workers=3, window=2, operations="1,3", last="1,2,1", network="merged"),
    "foreign-restarted": Scope(workers=3, window=1, operations="3", foreign_packets=1, restarts=1, network="merged"),
    "leaves-wide": Scope(workers=2, leaves="1,1", window=2, operations="2,1,3"),
    "leaves-of-two": Scope(workers=4, leaves="2,2", window=1, operations="6"),
    "leaf-lost-wide": Scope(workers=2, leaves="1,1", window=2, operations="3", restarts=1, network="merged"),
    "leaves-of-two-lost": Scope(workers=4, leaves="2,2", window=1, operations="2", restarts=1, network="merged"),
    "leaf-of-two-lost-twice": Scope(workers=3, leaves="2,1", window=1, operations="2", restarts=2, network="merged"),
    "numbered-three-chunks": Scope(workers=2, window=2, operations="3", numbers=8),
    "numbered-often": Scope(workers=1, window=2, operations="3", numbers=8, timeouts=2),
    "numbered-four-of-three": Scope(workers=1, window=3, operations="4", numbers=4, timeouts=1),
    "numbered-leaf-four": Scope(workers=1, leaves="1", window=2, operations="4", numbers=8),
    "numbered-leaves": Scope(workers=2, leaves="1,1", window=2, operations="2", numbers=8),
    "pipeline-outlives-three": Scope(
        workers=3, operations="3", restarts=1, network="merged", pipelines="root", outlives=1
    ),
    "pipeline-three-chunks": Scope(workers=2, window=2, operations="3", numbers=8, pipelines="root"),
    "pipeline-beside-a-leaf-of-two": Scope(workers=2, leaves="1,1", window=2, operations="2", numbers=8, pipelines="0"),
    "pipeline-over-leaves": Scope(workers=2, leaves="1,1", window=2, operations="2", numbers=8, pipelines="root"),
    "tofino-wide": Scope(workers=3, window=2, operations="6", pipelines="root", chunk_bits=4),
    "tofino-three-restarted-twice": Scope(
        workers=3, operations="4", restarts=2, network="merged", pipelines="root", chunk_bits=3
    ),
    "tofino-disagreed-wide": Scope(
        workers=3, window=2, operations="1,3", last="1,2,1", network="merged", pipelines="root", chunk_bits=4
    ),
    "tofino-leaves-lost": Scope(
        workers=3, leaves="2,1", operations="2", restarts=1, network="merged", pipelines="root,0,1", chunk_bits=3
    ),
    "tofino-rogue-three-chunks": Scope(
        workers=3, operations="3", network="merged", pipelines="root", chunk_bits=3, rogue=1
    ),
    "rogue-three-chunks": Scope(workers=3, window=1, operations="3", rogue=1),
    "four": Scope(workers=4, window=1, operations="4", restarts=1, network="merged"),
}

# Recovery from a lost switch (recovery.py), searched by `make test`.
RECOVERY_QUICK = {
    # Results that only one rank has, chunks that are reduced again, operations that some ranks have not begun.
    "lost": RecoveryScope(ranks=2, window=1, operations="3"),
    "lost-streamed": RecoveryScope(ranks=2, window=2, operations="2,1"),
    "lost-of-three": RecoveryScope(ranks=3, window=2, operations="2"),
    # The switch comes back, and is lost once more at any moment of the recovery.
    "returned": RecoveryScope(ranks=2, window=1, operations="2,1", attempts=1),
    "lost-again": RecoveryScope(ranks=2, window=1, operations="1,1", losses=2, attempts=1),
    # A join that fails or takes too long, and another attempt.
    "refused": RecoveryScope(ranks=2, window=1, operations="1,1", attempts=2, refusals=1),
    # A rank that dies during recovery.
    "died": RecoveryScope(ranks=2, window=2, operations="2,1", deaths=1),
    "died-of-three": RecoveryScope(ranks=3, window=1, operations="1", deaths=1),
    "died-returning": RecoveryScope(ranks=2, window=1, operations="1", losses=2, attempts=1, deaths=1),
}

# Searched by `make model-check`, after those above.
RECOVERY_LARGE = {
    "three-lost-again": RecoveryScope(ranks=3, window=1, operations="1", losses=2, attempts=1),
    "streamed-lost-again": RecoveryScope(ranks=2, window=2, operations="2,1", losses=2, attempts=1),
    "refused-lost-again": RecoveryScope(ranks=2, window=1, operations="1", losses=2, attempts=2, refusals=1),
    "three-died-streamed": RecoveryScope(ranks=3, window=2, operations="2", deaths=1),
}

# The agreement on the next members after a loss (agreement.py), searched by `make test`.
AGREEMENT_QUICK = {
    # Two deaths at any moments: of leaders between accept and decide, of members that have passed the step.
    "members-two-deaths": AgreementScope(deaths=2, rounds=3),
    "members-two-deaths-on-one-host": AgreementScope(deaths=2, one_host=True),
    "members-not-all-voted": AgreementScope(deaths=1, voted=2),
    # A death while a newcomer joins.
    "members-newcomer": AgreementScope(deaths=1, newcomer=True),
    # A network cut into halves.
    "members-halves": AgreementScope(members=4, cut=2, rounds=1),
    "members-halves-and-a-death": AgreementScope(members=4, cut=2, deaths=1, rounds=1),
    # A member that lives is decided out, and comes late.
    "members-late": AgreementScope(members=2, deaths=1, suspicions=1, one_host=True, newcomer=True),
}

# Searched by `make model-check`, after those above.
AGREEMENT_LARGE = {
    "members-late-of-three": AgreementScope(deaths=1, suspicions=1),
    "members-late-of-three-on-one-host": AgreementScope(deaths=1, suspicions=1, one_host=True, newcomer=True),
    "members-late-replies": AgreementScope(
        members=2, deaths=1, suspicions=1, one_host=True, newcomer=True, late_replies=True
    ),
    "members-four-two-deaths": AgreementScope(members=4, deaths=2, rounds=1),
    "members-four-halves-and-a-death": AgreementScope(members=4, cut=2, deaths=1),
    "members-three-rounds": AgreementScope(deaths=2, rounds=4),
}

# An elastic job's generations, one after the other (generations.py), searched by `make test`.
GENERATIONS_QUICK = {
    # Two changes: the second death while the generation after the first is formed, or later.
    "generations-two-deaths": GenerationsScope(deaths=2),
    "generations-two-deaths-on-one-host": GenerationsScope(deaths=2, one_host=True),
    # A newcomer comes in, a member dies before it is told or sent the state, and one that was decided out comes late.
    "generations-newcomer": GenerationsScope(members=2, deaths=1, suspicions=1, newcomers=1, one_host=True, steps=0),
    # Members are decided out and come back.
    "generations-comes-back": GenerationsScope(suspicions=2, generations=2),
    # A member leaves in good order, and another one dies meanwhile.
    "generations-leaves": GenerationsScope(deaths=1, leaves="a"),
    # A member dies before it has sent the state.
    "generations-lacks": GenerationsScope(deaths=1, lacks="c"),
    "generations-none-has-it": GenerationsScope(members=2, deaths=1, lacks="b", one_host=True),
    # All members end, or all but one that the store names too late, and first ranks come.
    "generations-begins-again": GenerationsScope(members=2, deaths=2, fresh=2, one_host=True, steps=0, generations=2),
    "generations-begins-again-or-not": GenerationsScope(
        members=1, deaths=1, newcomers=1, fresh=1, one_host=True, steps=0, generations=2
    ),
    # The network is cut between halves, and is whole again or not; between two members that both reach the third.
    "generations-halves": GenerationsScope(members=2, cut=("ab",), heals=True),
    "generations-pair": GenerationsScope(cut=("ab",), steps=0),
    "generations-pair-whole-again": GenerationsScope(cut=("ab",), heals=True, steps=0, generations=2),
    "generations-store-holds-a-part": GenerationsScope(
        members=2, deaths=1, fresh=1, one_host=True, page=1, steps=0, generations=2
    ),
}

# Searched by `make model-check`, after those above.
GENERATIONS_LARGE = {
    "generations-halves-of-four": GenerationsScope(members=4, cut=("ac", "ad", "bc", "bd"), steps=0),
    "generations-pair-and-a-step": GenerationsScope(cut=("ab",)),
    "generations-last-pair": GenerationsScope(cut=("ac",)),
    "generations-three-deaths": GenerationsScope(members=4, deaths=3, one_host=True, steps=0, generations=4),
    "generations-two-newcomers": GenerationsScope(members=2, deaths=2, newcomers=2, steps=0),
    "generations-comes-back-of-three": GenerationsScope(suspicions=1, deaths=1, steps=0),
    "generations-two-leave": GenerationsScope(deaths=1, leaves="ab", generations=4),
    "generations-two-steps": GenerationsScope(deaths=2, steps=2),
    "generations-two-rounds": GenerationsScope(deaths=1, one_host=True, rounds=2),
}
