"""The books of a decoding step."""

import pytest

from kernels import step_checks
from kernels.interpreted import interpreted


def test_in_torch():
    step_checks.check_begin_step()
    step_checks.check_end_step()


@pytest.mark.parametrize("check", ["check_begin_step", "check_end_step"])
def test_as_kernels(check):
    assert interpreted("step_checks", check) == ""
