"""lab/bench/packet_values.py: the drawing in docs is of the measured data, and headers have the bytes that are sent."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def packet_values(pytestconfig):
    # The scripts of bench import each other by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "lab" / "bench")
        spec = importlib.util.spec_from_file_location("packet_values", ROOT / "lab" / "bench" / "packet_values.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def test_the_drawing_is_of_the_data_and_of_the_protocols_header(packet_values):
    drawn = packet_values.draw(json.loads(packet_values.DATA.read_text()))
    assert packet_values.DRAWING.read_text() == drawn


def test_the_profiles_page_has_the_same_parts_of_a_link(packet_values):
    page = (ROOT / "docs" / "reference" / "hardware-profile.md").read_text()
    parts = [packet_values.efficiency(values, packet_values.CABLE_BYTES) for values in packet_values.VALUES]
    assert "| values' part of the link | " + " | ".join(f"{part:.0%}" for part in parts) + " |" in page
    gains = [f"{parts[-1] / part - 1:.0%}" for part in parts[:-1]]
    assert "| a full MTU is quicker by | " + " | ".join(gains) + " | |" in page


def test_a_packet_of_the_talks_length_would_gain_what_the_talk_says(packet_values):
    # 68 values: a packet of 272 bytes of values and 114 others.
    ratio = packet_values.efficiency(352, packet_values.CABLE_BYTES) / packet_values.efficiency(
        68, packet_values.CABLE_BYTES
    )
    assert ratio == pytest.approx(packet_values.TALK_GAIN, abs=0.005)
    assert "packets of 68 values" in packet_values.verdict()
