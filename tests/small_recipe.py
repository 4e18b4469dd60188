"""Parts of recipes for tests that start `netfold train`."""

from __future__ import annotations

SMALL_GPT = """
[model]
name = "gpt"
width = 32
heads = 4
layers = 2
context = 32
[data]
name = "source"
context = 32
held_out = 0.002
"""
"""A model and data that train on a few cores in milliseconds a step."""
