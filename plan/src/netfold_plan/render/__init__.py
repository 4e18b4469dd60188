"""Results as text, as JSON, or as a page."""

from netfold_plan.render.data import as_json
from netfold_plan.render.page import render_page
from netfold_plan.render.text import render_text

__all__ = ["as_json", "render_page", "render_text"]
