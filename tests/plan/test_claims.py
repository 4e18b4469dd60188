"""The talks' headline claims: which come out, how far off the others are, and that the committed list is today's."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold.cli import app
from netfold.plan.validate.claims import Claim, claims, claims_markdown
from netfold.plan.validate.claims.claim import near

FOUND = {claim.name: claim for claim in claims()}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("BERT's scaling efficiency", 84.4, 89.6),
        ("Mask R-CNN on 192", 1000, 1783),
        ("SHARP, small all-reduces", 1.0, 1.2),
        ("A naive pipeline's idle slots", 66.6, 66.7),
        ("Idle slots, K=N", 49.8, 50.0),
        ("Idle slots, K=4N", 19.9, 20.0),
        ("ResNet-50 at batch 256, activations", 11, 12),
        ("SwitchML, scaling in workers", 1.0, 1.01),
    ],
)
def test_what_comes_out(name: str, low: float, high: float) -> None:
    claim = FOUND[name]
    assert claim.comes_out and low <= claim.predicted <= high, claim


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # Each is a gain as the talk says, of another size.
        ("EFA over TCP, BERT", 1.02, 1.5),
        ("SHARP, ResNet-50", 0.1, 3),
        ("SwitchML, the model that gains least", 0.5, 10),
        ("SwitchML, the model that gains most", 50, 75),
        ("MPI-Opt over default MPI, 512 GPUs", 27, 45),
        # Less than the talk says, by what is not counted.
        ("ResNet-50 at batch 256, all", 11, 12),
        # A loss: weights are gathered after the update, and hide behind nothing.
        ("The distributed optimizer's gain", 0.95, 1.0),
    ],
)
def test_what_does_not_come_out_has_its_direction_and_a_reason(name: str, low: float, high: float) -> None:
    claim = FOUND[name]
    assert not claim.comes_out and low <= claim.predicted <= high, claim
    assert len(claim.why.split()) > 10


def test_every_claim_has_a_name_of_its_own_and_says_what_was_asked() -> None:
    assert len(FOUND) == 15
    assert all(claim.asked and claim.words and claim.talk.startswith("seeds/00") for claim in FOUND.values())


def test_a_claim_comes_out_within_a_fifth_of_what_is_gained_or_lost() -> None:
    assert near(16.0) == pytest.approx((12.8, 19.2))
    assert near(2.0, nothing=1.0) == pytest.approx((1.8, 2.2))
    assert near(87.0, nothing=100.0) == pytest.approx((84.4, 89.6))
    said = Claim("a", "b", "c", 2.0, 1.79, "x", *near(2.0, 1.0), "d")
    assert not said.comes_out


def test_the_committed_claims_are_what_is_predicted_now() -> None:
    committed = (Path(__file__).parents[2] / "bench" / "results" / "plan.md").read_text()
    assert claims_markdown(list(FOUND.values())) in committed, (
        "make it again: netfold plan validate --markdown > bench/results/plan.md"
    )


def test_the_verb_has_them_as_json_as_text_and_alone() -> None:
    done = CliRunner().invoke(app, ["plan", "validate", "--claims", "--json"])
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert list(told) == ["claims"]
    assert {claim["name"]: claim["comes_out"] for claim in told["claims"]}["Idle slots, K=N"] is True
    shown = CliRunner().invoke(app, ["plan", "validate", "--claims"]).stdout
    assert "BERT's scaling efficiency: 87%, predicted" in shown and "does not" in shown


def test_claims_beside_runs_of_ones_own_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "validate", "--claims", "--runs", str(tmp_path / "runs.csv")])
    assert done.exit_code == 2 and "--claims are the talks', and --runs are yours" in done.output
