"""The talks' headline claims: the predictions that agree, the error of each other one, and the committed list."""

import json
from pathlib import Path

import pytest
from validation.__main__ import main
from validation.claims import NEAR, around, claims, claims_markdown

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
def test_a_prediction_agrees_with_the_talk(name: str, low: float, high: float) -> None:
    claim = FOUND[name]
    assert claim.agrees and low <= claim.finding.predicted <= high, claim


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # Each of these is a gain, as in the talk, but of another size.
        ("EFA over TCP, BERT", 1.02, 1.5),
        ("SHARP, ResNet-50", 0.1, 3),
        ("SwitchML, the model that gains least", 0.5, 10),
        ("SwitchML, the model that gains most", 50, 75),
        ("MPI-Opt over default MPI, 512 GPUs", 27, 45),
        # Less than in the talk: some memory is not counted.
        ("ResNet-50 at batch 256, all", 11, 12),
        # A loss: weights are gathered after the update, and nothing hides that.
        ("The distributed optimizer's gain", 0.95, 1.0),
    ],
)
def test_a_prediction_that_differs_has_its_direction_and_a_reason(name: str, low: float, high: float) -> None:
    claim = FOUND[name]
    assert not claim.agrees and low <= claim.finding.predicted <= high, claim
    assert len(claim.finding.why.split()) > 10


def test_every_claim_has_a_unique_name_and_a_request() -> None:
    assert len(FOUND) == len(claims()) == 15
    assert all(claim.finding.asked and claim.words and claim.talk for claim in FOUND.values())


def test_a_prediction_agrees_within_a_fifth_of_the_gain_or_loss() -> None:
    assert NEAR == 0.2
    assert around(16.0) == pytest.approx((12.8, 19.2))
    assert around(2.0, nothing=1.0) == pytest.approx((1.8, 2.2))
    assert around(87.0, nothing=100.0) == pytest.approx((84.4, 89.6))
    assert around(67.0, digits=0.5) == pytest.approx((66.5, 67.5))


def test_the_committed_claims_equal_the_present_predictions() -> None:
    committed = (Path(__file__).parents[3] / "lab" / "bench" / "results" / "plan.md").read_text()
    assert claims_markdown(claims()) in committed, (
        "make it again: python lab/bench/validation > lab/bench/results/plan.md"
    )


def test_the_script_prints_only_the_claims_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--claims", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["sources"] == []
    assert {claim["name"]: claim["agrees"] for claim in told["claims"]}["Idle slots, K=N"] is True
    main(["--claims"])
    assert "| BERT's scaling efficiency | 87% |" in capsys.readouterr().out


def test_claims_beside_a_table_of_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--claims", "--runs", str(tmp_path / "runs.csv")])
    assert "--claims and --runs exclude each other" in capsys.readouterr().err
