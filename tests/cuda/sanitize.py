"""Runs every CUDA kernel once on each of its small samples, in one process, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/cuda/sanitize.py
    make sanitize                                   # memcheck and racecheck

Results are not compared: `pytest -m cuda` does that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from surogate_core import engine, ops  # noqa: E402
from surogate_core.ops import conformance  # noqa: E402


def size(case: conformance.Case) -> int:
    """Elements of all operands."""
    return sum(stored.values.size for stored in (*case.inputs, *case.outputs) if stored is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=sorted(ops.ALL))
    parser.add_argument("--elements", type=int, default=1 << 16, help="samples with more elements are left out")
    args = parser.parse_args()
    engine.load_backend("cuda")
    runs = refused = 0
    for name in args.op or sorted(ops.ALL):
        record = ops.get(name)
        cases = [case for case in conformance.cases(record) if size(case) <= args.elements]
        for kernel in conformance.kernels_of(record, "cuda"):
            for case in cases:
                for in_place in (False, True) if case.can_run_in_place(kernel) else (False,):
                    try:
                        case.run(kernel, 1, in_place)
                        runs += 1
                    except engine.EngineError as error:
                        if "cannot run op" not in error.message:
                            print(f"!! {kernel['name']}: {case}: {error.message}")
                            refused += 1
    print(f"{runs} runs, {refused} errors")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
