"""The switch's share of an operation: the arithmetic, and the search for it, in a model of a shared link."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from netfold._native import shares

LINK = 25_000_000
N = 16 << 20


@dataclass
class Net:
    """ranks behind links of LINK; switches of c[i] links each; `mine`: of a full link, what the switches' flow gets."""

    ranks: int
    c: list[float]
    mine: float = 0.5
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def per_byte(self) -> float:
        """The link's bytes for one byte by the ring."""
        return 2 * (self.ranks - 1) / self.ranks

    @property
    def through(self) -> list[float]:
        return [LINK * each / self.ranks for each in self.c]

    def best_s(self) -> float:
        """The time of the better of one path alone and both together, given how they share the link."""
        through = min(LINK, sum(self.through))
        beside = min(sum(self.through), LINK * self.mine)
        return N / max(through, LINK / self.per_byte, beside + (LINK - beside) / self.per_byte)

    def run(self, parts: list[int]) -> tuple[float, list[tuple[int, int]]]:
        """Seconds, and the arguments of `learn`. All switches share this rank's link, each up to its own rate."""
        given = [N * part / shares.WHOLE for part in parts]
        left = list(given)
        ends = [0.0] * len(parts)
        marks: dict[bool, tuple[float, list[float]]] = {}  # by whether the host ended: when, and the bytes left then
        now = 0.0
        while any(left):
            host = left[-1] > 0
            room = LINK * (self.mine if host else 1)
            rates = []
            for way, limit in enumerate(self.through):
                rates.append(min(limit, room) if left[way] > 0 else 0.0)
                room -= rates[-1]
            rates.append((LINK - sum(rates)) / self.per_byte if host else 0.0)
            step = min(left[way] / rate for way, rate in enumerate(rates) if rate > 0)
            now += step
            for way, rate in enumerate(rates):
                if left[way] > 0:
                    left[way] -= rate * step
                    if left[way] < 1:
                        left[way], ends[way] = 0.0, now
            if left[-1] == 0 and True not in marks:
                marks[True] = (now if given[-1] else 0.0, list(left))
            if not any(left[:-1]) and False not in marks:
                marks[False] = (now if any(given[:-1]) else 0.0, list(left))
        slower = 1 + self.random.uniform(0, self.noise)

        def rate(count: float, seconds: float) -> int:
            return int(count / seconds / slower) if seconds > now / 16 else 0

        rates = []
        for way, end in enumerate(ends):
            others_s, rest = marks[way != len(self.c)]
            if others_s == 0:
                rest = given
            before = given[way] - (rest[way] if end > others_s else 0)
            rates.append((rate(before, min(end, others_s)), rate(given[way] - before, end - others_s)))
        return now, rates


def once(net: Net, split: shares.Shares) -> float:
    seconds, rates = net.run(split.parts)
    if split.learns:
        split.learn(rates)
    else:
        split.skip()
    return seconds


def begun(net: Net, rates: list[float]) -> shares.Shares:
    return shares.Shares([max(1, int(rate)) for rate in rates], int(LINK / net.per_byte), LINK)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("c", [0.25, 0.5, 1, 2, 4, 8, 64])
def test_parts_end_together_where_the_rates_are_known(ranks: int, c: float) -> None:
    net = Net(ranks, [c])
    parts = begun(net, net.through).parts
    assert sum(parts) == shares.WHOLE
    through, ring = net.through[0], LINK / net.per_byte
    together = through + ring * (1 - through / LINK)
    if through >= LINK > ring:
        assert parts == [shares.WHOLE, 0]
    elif together <= 1.03 * ring:  # less than its cost
        assert parts == [0, shares.WHOLE]
    elif parts == [0, shares.WHOLE]:
        assert together <= 1.04 * ring
    else:
        assert parts[0] / shares.WHOLE == pytest.approx(through / together, abs=1 / 1000)


@pytest.mark.parametrize("mine", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("wrong", [0.2, 0.5, 1, 2, 5])
@pytest.mark.parametrize("c", [0.25, 1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [4, 8])
def test_wrong_rates_are_corrected_whichever_path_gets_more_of_the_link(
    ranks: int, c: float, wrong: float, mine: float
) -> None:
    net = Net(ranks, [min(c, ranks)], mine=mine, noise=0.02)
    split = begun(net, [min(rate * wrong, LINK) for rate in net.through])
    times = []
    for _ in range(200):
        times.append(once(net, split))
    late = sorted(times[100:])
    assert late[len(late) // 2] <= 1.06 * net.best_s(), (split.paths, split.balanced)
    assert sum(late) / len(late) <= 1.08 * net.best_s()


def test_two_switches_get_parts_by_their_rates() -> None:
    net = Net(8, [1, 3])
    split = begun(net, [LINK / 4, LINK / 4])
    for _ in range(100):
        once(net, split)
    small, large, host = split.balanced
    assert large / small == pytest.approx(3, rel=0.25)
    assert host > 0


@pytest.mark.parametrize(("before", "after"), [(4.0, 1.0), (1.0, 4.0), (8.0, 2.0), (4.0, 0.25)])
def test_a_link_that_changes_is_noticed_within_twenty_operations(before: float, after: float) -> None:
    net = Net(8, [before])
    split = begun(net, net.through)
    for _ in range(300):
        once(net, split)
    net.c = [after]
    times = []
    for _ in range(40):
        times.append(once(net, split))
    assert sorted(times[20:])[10] <= 1.1 * net.best_s(), split.paths


@pytest.mark.parametrize(("ranks", "c"), [(3, 1.5), (4, 2), (8, 4)])
def test_pauses_of_single_operations_do_not_take_the_switch_its_part(ranks: int, c: float) -> None:
    """15% of the operations take 1.2 to 2.5 times as long, whatever path they use."""
    took = best = 0.0
    for seed in range(12):
        pauses = random.Random(seed)
        net = Net(ranks, [c], noise=0.02, random=random.Random(seed + 1))
        split = begun(net, net.through)
        for _ in range(60):
            longer = pauses.uniform(1.2, 2.5) if pauses.random() < 0.15 else 1.0
            seconds, rates = net.run(split.parts)
            took += seconds * longer
            best += net.best_s() * longer
            if split.learns:
                split.learn([(int(beside / longer), int(alone / longer)) for beside, alone in rates])
            else:
                split.skip()
    assert took <= 1.06 * best, took / best


def test_a_slow_part_of_the_ring_does_not_hide_that_it_is_faster_alone() -> None:
    """As with 8 hosts at 200 Mbit/s, one of them the switch. Rates: bytes/s beside the other path, and alone."""
    found = shares.Shares([3_300_000], 13_500_000, 23_500_000)
    found.learn([(2_600_000, 0), (6_100_000, 6_600_000)])
    assert found.balanced == [0, shares.WHOLE]
    # The rate when it runs alone counts; then both together are faster.
    found.learn([(0, 0), (0, 5_000_000)])
    assert found.paths[1] == (5_000_000, 5_000_000)
    assert found.balanced[0] > shares.WHOLE / 4


def test_fixed_parts_stay() -> None:
    split = shares.Shares([LINK // 2], LINK // 2, LINK, [shares.WHOLE // 4])
    for _ in range(30):
        assert split.parts == [1024, 3072]
        split.learn([(1_000_000, 0), (9_000_000, 5)])


@pytest.mark.parametrize(
    "arguments",
    [([], 1, 1, []), ([0], 1, 1, []), ([1], 0, 1, []), ([1], 1, 1, [1, 1]), ([1], 1, 1, [4097])],
)
def test_invalid_shares_are_refused(arguments: tuple[list[int], int, int, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"rates above 0|fixed parts"):
        shares.Shares(*arguments)
