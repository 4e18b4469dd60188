"""Single courses of the agreement on the next members. lab/src/netfold_lab/model_check searches all of them."""

from __future__ import annotations

from netfold.elastic.agreement import Accept, Agreement, Ask, Decide, Decision, Prepare, Promise, Report, decide_from

CLEAN = Report(done=3, voted=False, clean=True)


def members(size: int, *, one_host: bool = False, reports: dict[int, Report] | None = None) -> list[Agreement]:
    made = [Agreement(rank, size, one_host=one_host) for rank in range(size)]
    for each in made:
        each.begin((reports or {}).get(each.rank, CLEAN))
    return made


def exchange(leader: Agreement, peers: list[Agreement]) -> None:
    """Send what the leader wants from these peers, and take their replies."""
    for peer in peers:
        request = leader.wanted().get(peer.rank)
        if request is not None:
            leader.take(peer.rank, peer.handle(leader.rank, request))


def agree(leader: Agreement, peers: list[Agreement], newcomers: tuple[str, ...] = ()) -> Decision:
    leader.lead()
    exchange(leader, peers)
    assert leader.may_propose
    leader.propose(newcomers)
    exchange(leader, peers)
    assert leader.decision is not None
    return leader.decision


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    first, second, _, last = members(4)
    first.suspect(2)
    assert agree(first, [second, last], ("new",)) == Decision((0, 1, 3), ("new",), 3, (), ())


def test_members_that_have_voted_apply_the_step_that_one_member_has_passed() -> None:
    voted = Report(done=3, voted=True, clean=True)
    passed = Report(done=4, voted=False, clean=True)
    assert decide_from({0: voted, 1: passed, 2: voted}, (), (), None) == Decision((0, 1, 2), (), 4, (0, 2), ())
    assert decide_from({0: voted, 1: voted}, (), (), None) == Decision((0, 1), (), 3, (), ())


def test_a_member_without_the_state_says_nothing_about_steps_and_is_sent_it() -> None:
    lacks = Report(done=9, voted=False, clean=False)
    assert decide_from({0: CLEAN, 1: lacks}, (), (), None) == Decision((0, 1), (), 3, (), (1,))


def test_a_member_that_leaves_counts_for_the_quorum_and_is_no_member_afterwards() -> None:
    leaves = CLEAN._replace(leaves=True)
    first, second, _ = members(3, reports={0: leaves})
    first.suspect(2)
    assert agree(first, [second]).members == (1,)


def test_newcomers_are_as_many_as_members_and_as_the_largest_size_allows() -> None:
    waiting = tuple("abcdef")
    reports = {0: CLEAN, 1: CLEAN, 2: CLEAN}
    assert decide_from(reports, (), waiting, None).newcomers == ("a", "b", "c")
    assert decide_from(reports, (), waiting, 4).newcomers == ("a",)
    assert decide_from(reports, (), waiting, 3).newcomers == ()


def test_a_half_decides_only_with_rank_0() -> None:
    first, second, third, fourth = members(4)
    for one, other in ((first, second), (third, fourth)):
        for peer in range(4):
            if peer not in (one.rank, other.rank):
                one.suspect(peer)
        one.lead()
        exchange(one, [other])
    assert first.may_propose and not third.may_propose


def test_a_member_that_comes_late_learns_the_decision() -> None:
    first, second, late = members(3)
    first.suspect(2)
    decision = agree(first, [second])
    late.suspect(0)
    late.suspect(1)
    late.lead()
    assert not late.may_propose
    late.take(0, first.handle(2, Prepare(late.ballot, frozenset())))
    assert late.decision == decision and late.rank not in decision.members


def test_the_next_leader_proposes_what_may_have_been_decided() -> None:
    first, second, third = members(3)
    first.suspect(2)
    first.lead()
    exchange(first, [second])
    first.propose()
    second.handle(0, Accept(first.ballot, first.proposal, frozenset()))  # and rank 0 dies before it learns that
    second.suspect(0)
    assert agree(second, [third]) == first.proposal == Decision((0, 1), (), 3, (), ())


def test_on_one_host_the_last_one_goes_on_alone_and_elsewhere_it_does_not() -> None:
    for one_host in (True, False):
        *_, last = members(4, one_host=one_host)
        for peer in range(3):
            last.suspect(peer, certain=True)
        last.lead()
        assert last.may_propose == one_host
        assert last.rests_on_ends


def test_nothing_is_taken_any_more_from_members_that_have_ended_where_that_makes_a_quorum() -> None:
    """Ranks 0 and 1 of one host decide, and end. The message arrives during the ballot of ranks 2 and 3."""
    first, second, third, fourth = members(4, one_host=True)
    for peer in (2, 3):
        second.suspect(peer)
    decision = agree(second, [first])
    assert decision.members == (0, 1)
    for peer in (0, 1):
        third.suspect(peer, certain=True)
    third.lead()
    exchange(third, [fourth])
    third.propose()
    exchange(third, [fourth])
    fourth.handle(1, Decide(decision))  # sent before rank 1 ended
    third.take(1, Decide(decision))
    exchange(third, [fourth])
    assert third.decision == Decision((2, 3), (), 3, (), ())
    assert fourth.decision is None
    fourth.take(2, third.handle(3, Ask()))
    assert fourth.decision == third.decision


def test_a_ballot_begun_before_a_member_ended_is_begun_again() -> None:
    _, second, third = members(3, one_host=True)
    second.suspect(0, certain=True)
    second.lead()
    assert not second.may_propose and not second.is_stuck  # rank 2 may answer
    second.suspect(2, certain=True)
    assert second.is_stuck and not second.may_propose
    second.lead()
    assert second.may_propose and second.fenced == {0, 2}
    assert isinstance(third.handle(1, Prepare(second.ballot, second.fenced)), Promise)
