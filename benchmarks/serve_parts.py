"""What cache blocks and text cost the serving loop on one core, natively: nanoseconds a block and a token.

    python benchmarks/serve_parts.py

Compiles benchmarks/serve_parts.cpp against the engine of this working copy, so a C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from common import Clock, emit

import surogate_core

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = Path(surogate_core.__file__).parent / "lib"


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if found is None:
        raise SystemExit("no C++ compiler: install one, or set CXX to one")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=20, help="runs of each row, of which the fastest counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/serve_parts"
        subprocess.run(
            [
                compiler(), "-std=c++20", "-O3", f"-I{ROOT}/native/engine", f"-I{ROOT}/native/include",
                f"{ROOT}/benchmarks/serve_parts.cpp", "-o", program, f"-L{LIBRARIES}", "-lsurogate_engine",
                f"-Wl,-rpath,{LIBRARIES}",
            ],
            check=True,
        )
        with Clock(1) as clock:
            output = subprocess.run([program, str(arguments.reps)], check=True, capture_output=True, text=True).stdout
    lines = (line.split() for line in output.splitlines())
    emit("serve-parts", {f"{name}_ns": float(value) for name, value in lines}, seconds=round(clock.wall, 2))


if __name__ == "__main__":
    main()
