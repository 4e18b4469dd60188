"""Pages of HTML: one file each, without network, in light and dark, for a phone, a desk and paper. Pure functions.

`layout` makes a page of sections, `table` and `chart` are what sections hold, `escape` puts values into HTML. Every
page has the same style (`style.css`) and scripts (`errors.js`, `tables.js`). The products profile, plan, train, bench
and demo build their pages with this package.

May import: `netfold.units` and NumPy. Always: a page loads nothing, and text from a run never becomes markup.

Tests: `pytest core/tests/page core/tests/profile/test_profile_page.py`
"""
