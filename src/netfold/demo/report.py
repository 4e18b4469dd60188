"""`report.html`: one file that needs no network; charts and pictures are inside it."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime, timezone
from html import escape
from pathlib import Path

import torch

from netfold.bench.machine import describe_machine, describe_versions
from netfold.demo import figures
from netfold.demo.agreement import ALLOWED_RATIO
from netfold.demo.experiment import Experiment, HeldOut
from netfold.demo.settings import SCALE
from netfold.demo.table import COLUMNS, notes, rows
from netfold.train.datasets.photos import HELD_OUT, TRAINING

# Pixels of the page for one pixel of the truth in a crop: large enough to see single pixels.
CROP_ZOOM = 3


def write(story: Experiment, folder: Path, seconds: float) -> Path:
    """Write the page into `folder`, which is made where it is missing; `seconds` is what all of it took."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(render(story, seconds), encoding="utf-8")
    return page


def render(story: Experiment, seconds: float) -> str:
    agreement = story.agreement
    failures = story.failures()
    verdict = "".join(f"<li>{escape(failure)}.</li>" for failure in failures)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>netfold demo</title>
<style>{_STYLE.replace("CROP_SIDE", str(CROP_ZOOM * figures.CROP_PIXELS))}</style>
</head>
<body>
<main>
<h1>The same network, trained through a switch and without one</h1>
<p class="lead">{_what_happened(story)}</p>
{f'<ul class="failed">{verdict}</ul>' if failures else ""}
<div class="facts">
{_facts(story)}
</div>

<div class="wide">{_table(story)}</div>
<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes(story.training))}</ul>

<h2>The losses</h2>
<figure>{figures.loss_curves(story)}
<figcaption>Every step of both trainings, not smoothed. It goes up and down because patches differ; an untrained
network is exactly bicubic (grey), so what is below the grey line is learnt.</figcaption></figure>

<h2>Equal, but for rounding?</h2>
<p>{_how_equal(story)}</p>
<figure>{figures.deviations(agreement)}
<figcaption>Difference of the loss from gloo's, step by step, on a logarithmic scale; steps without any difference
are left open.</figcaption></figure>

<h2>What the network sees</h2>
<p>Held-out photographs at half their size, enlarged {SCALE} times. Each detail is the {figures.CROP_PIXELS}
× {figures.CROP_PIXELS} pixels of the photograph in which <em>bicubic</em> errs most, shown {CROP_ZOOM} times as
large, pixel by pixel.</p>
{"".join(_strip(photograph) for photograph in story.held_out)}

<h2>How it was made</h2>
<dl>{_made(story, seconds)}</dl>
</main>
</body>
</html>
"""


def _what_happened(story: Experiment) -> str:
    training = story.training
    return (
        f"{training.workers} worker processes on this machine trained EDSR, a super-resolution network of "
        f"{story.parameters:,} parameters, for {training.steps} steps with PyTorch's DistributedDataParallel. "
        f"First over netfold: a <em>switch</em>, one more process, added up their gradients. Then from the same "
        f"seeds over gloo, where the workers add up among themselves. The photographs are those that ship with "
        f"scikit-image: {len(TRAINING)} to train on, {len(HELD_OUT)} others held out to judge by."
    )


def _how_equal(story: Experiment) -> str:
    agreement = story.agreement
    permutations = len(agreement.gloo_differences)
    if not agreement.gloo_ever_differs:
        return (
            f"Sums of floating-point numbers depend on their order, but two have the same sum either way. Over "
            f"{agreement.steps} steps {escape(agreement.in_words())}."
        )
    return (
        "Sums of floating-point numbers depend on their order, and training amplifies the last bit from step to step. "
        f"So gloo ran {permutations} more times, {agreement.steps} steps each, with the same batches but its ranks "
        f"permuted: only the order of its sums changes. The geometric mean over these steps of the largest "
        f"difference so far, netfold from gloo over gloo from gloo, is <strong>{agreement.ratio:.2f}</strong>. Up to "
        f"{ALLOWED_RATIO:.0f} counts as rounding: netfold's sums are one more sample of the same noise. Gradients "
        f"rounded to bfloat16 give 249 and more. Beyond these steps rounding has grown into different, equally good "
        f"trainings, and nothing is compared but the result."
    )


def _facts(story: Experiment) -> str:
    agreement = story.agreement
    gain = story.mean_psnr("netfold") - story.mean_psnr("bicubic")
    if agreement.gloo_ever_differs:
        equal = (
            f"{agreement.ratio:.2f} ×",
            f"distance of netfold's losses from gloo's, in units of gloo's from its own with ranks permuted; up to "
            f"{ALLOWED_RATIO:.0f} is rounding",
        )
    else:
        equal = (
            f"{float(agreement.difference.max()):.2g}",
            "largest difference of netfold's losses from gloo's, which do not depend on the order of its ranks",
        )
    facts = (
        (f"{gain:+.2f} dB", "EDSR over netfold against bicubic, on photographs it has never seen"),
        equal,
        (
            f"{story.netfold.wire_bytes_per_step / story.gloo.wire_bytes_per_step:.2f} ×",
            "bytes on the wire a worker, netfold to gloo: the switch adds, so each gradient goes up once and comes "
            "down once",
        ),
    )
    return "".join(
        f"<div><strong>{escape(number)}</strong><span>{escape(meaning)}</span></div>" for number, meaning in facts
    )


def _table(story: Experiment) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell) or '–'}</td>" for cell in row) + "</tr>" for row in rows(story))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _strip(photograph: HeldOut) -> str:
    crop = figures.crop(photograph)
    height, width = photograph.pair.truth.shape[-2:]
    frame = (
        f"top:{100 * crop.top / height:.2f}%;left:{100 * crop.left / width:.2f}%;"
        f"width:{100 * figures.CROP_PIXELS / width:.2f}%;height:{100 * figures.CROP_PIXELS / height:.2f}%"
    )
    details = (
        ("low resolution", crop.low, f"{figures.CROP_PIXELS // SCALE} × {figures.CROP_PIXELS // SCALE} pixels"),
        ("bicubic", crop.bicubic, f"{crop.bicubic_psnr:.2f} dB here"),
        ("EDSR over netfold", crop.netfold, f"{crop.netfold_psnr:.2f} dB here"),
        ("truth", crop.truth, ""),
    )
    pictures = "".join(
        f'<figure><img class="pixels" src="{source}" alt="{escape(photograph.name)}, {label}">'
        f"<figcaption><b>{label}</b> {said}</figcaption></figure>"
        for label, source, said in details
    )
    decibels = photograph.psnr
    return f"""<section class="photograph">
<h3>{escape(photograph.name)}
<small>whole photograph: bicubic {decibels["bicubic"]:.2f}, netfold {decibels["netfold"]:.2f}
({decibels["netfold"] - decibels["bicubic"]:+.2f}), gloo {decibels["gloo"]:.2f} dB</small></h3>
<div class="strip">
<figure class="whole"><div><img src="{figures.png(photograph.pair.low)}" alt="{escape(photograph.name)}">
<i style="{frame}"></i></div></figure>
{pictures}
</div>
</section>
"""


def _made(story: Experiment, seconds: float) -> str:
    training = story.training
    machine, versions = describe_machine(), describe_versions({"torch": torch.__version__})
    facts = {
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "when": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; {seconds:.0f} s for all of it",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "network": f"EDSR ×{SCALE}: {training.blocks} residual blocks of {training.features} features, "
        f"{story.parameters:,} parameters, {4 * story.parameters / 2**20:.2f} MB of gradients a step; "
        f"adds to the bicubic enlargement",
        "training": f"{training.steps} steps of {training.patches} patches, L1 loss, Adam, peak learning rate "
        f"{training.learning_rate:g}, seed {training.seed}, 1 thread a worker",
        "trained on": ", ".join(TRAINING),
        "held out": ", ".join(HELD_OUT),
    }
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())


_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --text: #1d2328; --quiet: #7c858c; --line: #dfe3e4;
  --netfold: #b3321c; --gloo: #6fa8c9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #15191c; --text: #e5e9eb; --quiet: #8d979e;
  --line: #30373c; --netfold: #ff8a66; --gloo: #3f7ea6; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--text);
  font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 3rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 2rem 0 0.6rem; text-transform: capitalize; }
h3 small { font-weight: 400; color: var(--quiet); margin-left: 0.6rem; text-transform: none; }
p { max-width: 46rem; margin: 0 0 1rem; }
.lead { font-size: 1.08rem; }
.failed { border: 2px solid var(--bad); border-radius: 6px; padding: 0.8rem 1rem 0.8rem 2rem; color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1.5rem 2rem;
  margin: 2rem 0; }
.facts div { border-top: 3px solid var(--netfold); padding-top: 0.6rem; }
.facts strong { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.facts span { color: var(--quiet); font-size: 0.92rem; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.5rem 0.8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--quiet); font-size: 0.9rem; line-height: 1.3; vertical-align: bottom;
  white-space: pre-line; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.notes { color: var(--quiet); font-size: 0.88rem; padding-left: 1.1rem; max-width: 52rem; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--quiet); font-size: 0.9rem; margin-top: 0.4rem; max-width: 46rem; }
.strip { display: flex; flex-wrap: wrap; gap: 0.8rem; align-items: flex-start; }
.strip figure { flex: 0 0 auto; }
.strip img { width: 100%; display: block; border-radius: 3px; }
.strip .pixels { image-rendering: pixelated; width: CROP_SIDEpx; }
.strip .whole { flex: 1 1 7rem; max-width: 11rem; }
.strip b { display: block; color: var(--text); }
.whole div { position: relative; }
.whole i { position: absolute; border: 2px solid #fff; outline: 1px solid #000; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1.5rem; font-size: 0.92rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
"""
