"""The faults of tests/planted_faults.py can still be planted. Whether the tests find them takes an hour to see."""

import pytest
from planted_faults import FAULTS, fitting_edit
from support import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place(fault):
    _, old, new = fitting_edit(fault, ROOT)
    assert old != new
