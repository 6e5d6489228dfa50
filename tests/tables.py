"""Tables of cases: those that `make test` runs, and the rest, which `make test-full` adds."""

import pytest


def table(cases, rest):
    """`cases` as parameters; those also in `rest` only run under `make test-full`."""
    assert all(case in cases for case in rest), "what is left out is of the table"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.full] if case in rest else [],
        )
        for case in cases
    ]
