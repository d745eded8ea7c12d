"""No gradients, and the same random numbers in every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
