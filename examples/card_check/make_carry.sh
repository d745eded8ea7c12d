#!/usr/bin/env bash
# Packs bitsandbytes for a machine without a network, into .carry/ (ignored by git; 4 MB), where card_check finds it:
# Python 3.12 on x86_64, of its libraries those for CUDA 13 and for a CPU. The whole wheel is ten times as large.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels="$(mktemp -d)"
trap 'rm -rf "$wheels"' EXIT
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 --dest "$wheels" bitsandbytes==0.50.2
mkdir -p .carry
"${PYTHON:-python3}" - "$wheels" .carry/bitsandbytes.zip <<'PYTHON'
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

(wheel,) = Path(sys.argv[1]).glob("bitsandbytes-*.whl")
with ZipFile(wheel) as whole, ZipFile(sys.argv[2], "w", ZIP_DEFLATED) as packed:
    for name in whole.namelist():
        if not name.endswith(".so") or "cuda130" in name or name.endswith("_cpu.so"):
            packed.writestr(name, whole.read(name))
PYTHON
ls -l .carry/bitsandbytes.zip
