"""A drafter for a random target of a few channels."""

import pytest
import torch
from small_loops import SPEC

from eagle31_hf.measure.synthetic import random_target, target_config
from helpers import random_drafter


@pytest.fixture(scope="module")
def drafter():
    return random_drafter(random_target(target_config(SPEC), dtype=torch.float32, device="cpu"))
