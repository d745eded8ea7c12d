"""Engines that live in an environment of their own (`make engines`), each in a process that answers JSON lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eagle31_hf.errors import ConfigurationError

from .json_lines import Worker

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[2] / ".engines"
INSTALL = "make engines"


def engine_python() -> Path:
    """The Python that can import the other engines.

    Raises:
        ConfigurationError: the environment has not been made.
    """
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / ".installed").exists() or not python.exists():
        raise ConfigurationError(
            f"the other engines are not installed: {ENVIRONMENT} is missing or not complete; run `{INSTALL}` in "
            f"{ENVIRONMENT.parent}"
        )
    return python


def start_engine(worker: str, settings: dict[str, Any], log: Path) -> Worker:
    """A worker of this folder, or one with a path: offline, no statistics sent, and with every core of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default one core is kept for the front end: half of two
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Worker([str(engine_python()), str(HERE / worker)], settings, environment, log)
