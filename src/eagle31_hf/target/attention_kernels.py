"""Which of SDPA's kernels serve a drafted text."""

from __future__ import annotations

import threading
from types import TracebackType

from torch.backends import cuda


class WithoutCudnn:
    """While open in any thread, SDPA does not choose cuDNN's attention.

    cuDNN makes a plan for each shape it meets, and every round of a drafted text has keys of another length. torch
    prefers it on Hopper and Blackwell; 22 ms and 0.4 s were reported for a new shape. The choice is the process's, not
    a thread's: a plain `generate` beside a drafted one goes without cuDNN, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._before = False

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._before = cuda.cudnn_sdp_enabled()
                cuda.enable_cudnn_sdp(False)
            self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                cuda.enable_cudnn_sdp(self._before)


WITHOUT_CUDNN = WithoutCudnn()
"""The one of this process: there is one switch, and texts may overlap."""
