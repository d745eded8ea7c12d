"""All steps, in the order of their worth: what comes first must be known even if the machine goes back early."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .machine import Machine
from .notes import Notes


@dataclass(frozen=True)
class Step:
    """A function `(machine, notes)` of a module here, imported where it runs: the driver must not depend on all.

    Attributes:
        module, function: its names.
        limit_s: most seconds that it may take on a card.
    """

    module: str
    function: str
    limit_s: float

    def run(self, machine: Machine, notes: Notes) -> None:
        getattr(import_module(f".{self.module}", __package__), self.function)(machine, notes)


STEPS = {
    "env": Step("kernels", "check_env", 40),
    "pair": Step("embedded", "check_pair", 110),
    "cudnn": Step("kernels", "check_cudnn", 45),
    "failures": Step("failures", "check_failures", 40),
    "big_bf16": Step("large", "check_bf16", 120),
    "linears": Step("kernels", "check_linears", 50),
    "attention": Step("kernels", "check_attention", 50),
    "big_nf4": Step("large", "check_nf4", 110),
    "tests": Step("uses", "check_tests", 100),
    "serve": Step("uses", "check_serve", 45),
    "train": Step("uses", "check_train", 60),
    "compiled": Step("large", "check_static_cache", 120),
}
