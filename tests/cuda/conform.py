"""Every kernel of a backend against the references, as a script: each op in a process of its own, so that a kernel that
brings the device down takes no other along.

    python tests/cuda/conform.py                  # all of CUDA; --backend cpu for the CPU's
    python tests/cuda/conform.py --op rms_norm    # one op, in this process, every problem printed

Prints a line an op and kernel: cases taken, problems, seconds. Ends with 1 where there are problems, or cases of an op of the
core that no kernel takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from surogate_core import engine, ops  # noqa: E402
from surogate_core.ops import conformance  # noqa: E402

SHOWN = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--op", action="append", choices=sorted(ops.ALL))
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one op")
    parser.add_argument("--json", action="store_true", help="one op: the verdicts as JSON")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(check(args.op[0], args.backend)))
        return 0
    names = args.op or sorted(ops.ALL)
    if len(names) == 1:
        verdicts = {names[0]: check(names[0], args.backend)}
    else:
        with ThreadPoolExecutor(args.jobs) as pool:
            verdicts = dict(zip(names, pool.map(lambda name: apart(name, args), names)))
    failed = 0
    for name, verdict in verdicts.items():
        failed += show(name, verdict, None if args.op else SHOWN)
    print(f"{failed} of {len(names)} ops have problems")
    return 1 if failed else 0


def check(name: str, backend: str) -> dict[str, Any]:
    """What the kernels of one op do: rows of (kernel, cases taken, problems, seconds), and cases that none takes."""
    if backend != "cpu":
        engine.load_backend(backend)
    record = ops.get(name)
    cases = conformance.cases(record)
    rows, taken = [], set()
    for kernel in conformance.kernels_of(record, backend):
        started = time.perf_counter()
        found = conformance.check_kernel(kernel, cases, (1, 1))
        taken |= {id(case) for case in found.supported}
        rows.append((kernel["name"], len(found.supported), found.problems, time.perf_counter() - started))
    return {"rows": rows, "missing": [str(case) for case in cases if id(case) not in taken], "died": ""}


def apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`check` in a process of its own."""
    command = [sys.executable, __file__, "--json", "--op", name, "--backend", args.backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"rows": [], "missing": [], "died": f"not done after {args.timeout:g} s"}
    if done.returncode:
        return {"rows": [], "missing": [], "died": f"exit code {done.returncode}: {done.stderr.strip()[-800:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, verdict: dict[str, Any], limit: int | None) -> bool:
    """Prints a verdict; whether it has problems."""
    bad = bool(verdict["died"] or verdict["missing"])
    if verdict["died"]:
        print(f"!! {name}: {verdict['died']}")
    for kernel, taken, problems, seconds in verdict["rows"]:
        bad |= bool(problems) or not taken
        print(f"{'!!' if problems or not taken else 'ok'} {name} {kernel}: {taken} cases, {len(problems)} problems, "
              f"{seconds:.1f} s")
        for problem in problems[:limit]:
            print(f"     {problem}")
    if verdict["missing"]:
        print(f"!! {name}: no kernel of the backend takes {len(verdict['missing'])} cases")
        for case in verdict["missing"][:limit]:
            print(f"     {case}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
