"""What inductor does again and again for each package, done once, and what it could do without, left out.

For processes that compile packages and do nothing else: inductor is changed for all of a process. A version of torch
that does these things otherwise is left as it is.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from filelock import FileLock


def hasten_inductor() -> None:
    """Compile packages in less time, to the same code."""
    _read_templates_once()
    _compile_wrappers_without_regex()
    _compile_both_headers_at_once()
    _compile_interface_once()


def _read_templates_once() -> None:
    """Inductor's templates of products are compiled by jinja at each use, which takes a quarter of a graph's time."""
    from torch._inductor.codegen.common import KernelTemplate  # slow to import

    read = getattr(KernelTemplate, "_template_from_string", None)
    if read is not None:
        KernelTemplate._template_from_string = staticmethod(cache(read))  # type: ignore[method-assign]


MODEL_BASE = Path(torch.__file__).with_name("include") / "torch/csrc/inductor/aoti_runtime/model_base.h"
"""Of the code around each of AOTInductor's packages."""

WRAPPER_HEADERS = Path(__file__).with_name("wrapper_headers.h")

ITS_HEADER = "torch/csrc/inductor/aoti_include/cpu.h"
"""What inductor would let wrappers include."""

ITS_REGEX = [
    "#include <regex>",
    'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");',
    "std::smatch sm;",
    "bool matched = std::regex_match(device_str, sm, re);",
]
"""Where `WRAPPER_HEADERS` knows how to do without: these lines, and no other, of `MODEL_BASE`."""


def _compile_wrappers_without_regex() -> None:
    """Let wrappers include `WRAPPER_HEADERS`, which takes a third off the time of a package that does little."""
    from torch._inductor import codecache  # slow to import

    headers = getattr(codecache, "_get_cpp_wrapper_header", None)
    if headers is None or _regex_of(MODEL_BASE) != ITS_REGEX:
        return

    def of(device: str, aot_mode: bool = False) -> str:
        theirs = headers(device, aot_mode)
        return str(WRAPPER_HEADERS) if theirs == ITS_HEADER else theirs

    codecache._get_cpp_wrapper_header = of


def _compile_both_headers_at_once() -> None:
    """Headers of wrappers and of kernels are compiled once for all packages, 10 seconds each: inductor asks for one
    after the other, while every other process waits."""
    from torch._inductor import codecache  # slow to import

    compile_header = getattr(codecache, "_precompile_header", None)
    header_of_kernels = getattr(codecache, "_get_cpp_prefix_header", None)
    if compile_header is None or header_of_kernels is None:
        return
    begun: set[str] = set()

    def of_kernels(device: str, command: str, options: dict[str, Any]) -> None:
        with suppress(Exception):  # whoever waits for it meets the same
            if header := header_of_kernels(device):
                compile_header(header, command, **options)

    def both(header: str, command: str, **options: Any) -> str:
        device = options.get("device_type", "")
        if "min_optimize" in options and device not in begun:  # wrappers come first, and have it
            begun.add(device)
            kernels_options = {name: value for name, value in options.items() if name != "min_optimize"}
            Thread(target=of_kernels, args=(device, command, kernels_options), daemon=True).start()
        return compile_header(header, command, **options)

    codecache._precompile_header = both  # type: ignore[assignment]


INTERFACE = Path(torch.__file__).parent / "_inductor/codegen/aoti_runtime/interface.cpp"
"""Functions by which a package is called, which AOTInductor writes into each wrapper."""

KNOWN_INTERFACES = {
    "02306319fed87cd8c850756fcf65bdff04714f5ad51ddf2c232b0135b52ebf58",  # torch 2.13
    "765224ead5bb61fd499f908dec8adbbff2b67e8d80af0f17b7ee39d2d1173f76",  # torch 2.14
}
"""Digests of those that are known to be the same in every package."""


def _compile_interface_once() -> None:
    """Link one compiled `INTERFACE` into all packages: it takes a compiler longer than the rest of a wrapper.

    It lies in the working folder, which the processes of a pool share.
    """
    from torch._inductor import codecache, config  # slow to import
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    builder = getattr(codecache, "CppBuilder", None)
    write = getattr(CppWrapperCpu, "_write_aoti_interface_header", None)
    if builder is None or write is None or _digest_of(INTERFACE) not in KNOWN_INTERFACES:
        return

    def include_declarations(self: Any) -> None:
        if not config.aot_inductor.dynamic_linkage:
            return write(self)
        self.header.splice("#include <torch/csrc/inductor/aoti_runtime/model_container.h>\n")

    CppWrapperCpu._write_aoti_interface_header = include_declarations  # type: ignore[method-assign]
    codecache.CppBuilder = _linking_interface(builder)  # type: ignore[misc]


def _linking_interface(builder: type[Any]) -> type[Any]:
    """A builder that compiles the interface beside a wrapper, and links it into the wrapper's package."""
    interface = _Interface(builder)

    class Builder(builder):  # type: ignore[misc]
        def __init__(self, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = ""):
            if isinstance(sources, list) and any(map(_is_wrapper, sources)):
                sources = [*sources, interface.compiled()]
            super().__init__(name, sources, BuildOption, output_dir)
            if isinstance(sources, str) and _is_wrapper(sources):
                interface.begin(BuildOption)

    return Builder


def _is_wrapper(file: str) -> bool:
    return Path(file).stem.endswith(".wrapper")


class _Interface:
    """`INTERFACE`, compiled by the first process of a pool that needs it."""

    def __init__(self, builder: type[Any]):
        self._builder = builder
        self._thread = ThreadPoolExecutor(1)
        self._compiled: Future[str] | None = None

    def begin(self, options: Any) -> None:
        """Compile it with a wrapper's options, unless that was done."""
        self._compiled = self._thread.submit(self._compile, options)

    def compiled(self) -> str:
        """Path of the object, once it is there; raises what its compiler said."""
        assert self._compiled is not None, "begun with the wrapper"
        return self._compiled.result()

    def _compile(self, options: Any) -> str:
        command = self._builder("interface", str(INTERFACE), options).get_command_line()
        path = Path(f"interface-{hashlib.sha256(command.encode()).hexdigest()[:12]}.o").absolute()
        with FileLock(f"{path}.lock"):
            if not path.exists():
                own = self._builder(f"{path.stem}.{os.getpid()}", str(INTERFACE), options, str(path.parent))
                own.build()
                Path(own.get_target_file_path()).replace(path)  # whole, or not there
        return str(path)


def _digest_of(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _regex_of(header: Path) -> list[str]:
    """Lines of a header that have to do with regular expressions."""
    try:
        lines = header.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if "regex" in line or "smatch" in line]
