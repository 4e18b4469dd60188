"""With any one check missing the search finds a broken promise. `tests/conftest.py` prints the traces."""

import pytest
from mutants import HELLOS, MUTANTS, STUCK, make, search, search_validation

from netfold_lab.model_check import Scope
from netfold_lab.model_check import search as search_production


@pytest.mark.parametrize("name", MUTANTS)
def test_a_machine_without_a_check_is_caught(name, tmp_path):
    mutant = MUTANTS[name]
    broken, records = search(mutant, tmp_path)
    assert broken.startswith(mutant.breaks)
    # The trace ends with the step that breaks the promise, or, where no path leads to the end, in the first such state.
    ends = [""] * len(records) if mutant.breaks == STUCK else [""] * (len(records) - 1) + [broken]
    assert [record.broken for record in records] == ends
    print(f"{name}: {broken}\n  {'; '.join(record.step for record in records)}")


@pytest.mark.parametrize("name", HELLOS)
def test_address_validation_without_a_check_is_caught(name, tmp_path):
    assert search_validation(name, tmp_path) == HELLOS[name][2]


@pytest.mark.parametrize("scope", sorted({mutant.scope for mutant in MUTANTS.values()}, key=str), ids=str)
def test_production_passes_the_scopes_that_mutants_fail(scope):
    report = search_production(scope)
    assert report.exhausted
    assert report.broken == ""


def test_a_mutant_of_code_that_has_changed_is_refused(tmp_path):
    mutant = next(iter(MUTANTS.values()))
    changed = type(mutant)(Scope(), "", (("worker.cpp", "a text that is not there", ""),))
    with pytest.raises(LookupError, match=r"worker\.cpp has 0 times"):
        make(changed, tmp_path)
