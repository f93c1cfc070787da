"""Runs several benchmark commands in turn, round after round, and prints the median of each metric.

    python benchmarks/rounds.py --rounds 5 "python benchmarks/train_cpu.py --reps 1" "python peer.py --reps 1"

Commands print JSON lines with "bench" and "metrics". Rows with a share below --least-share are dropped. Taking turns is
what makes ratios comparable on a machine whose speed drifts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
from collections import defaultdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least-share", type=float, default=0.85)
    args = parser.parse_args()
    rows: dict[tuple[int, str], list[dict]] = defaultdict(list)
    for _ in range(args.rounds):
        for index, command in enumerate(args.commands):
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                    rows[index, row["bench"]].append(row["metrics"])
    for (index, bench), metrics in rows.items():
        kept = [m for m in metrics if m.get("share", 1.0) >= args.least_share]
        medians = {key: round(statistics.median(m[key] for m in kept), 3) for key in (kept[0] if kept else {})}
        print(json.dumps({"bench": bench, "command": args.commands[index], "rows": len(metrics), "kept": len(kept),
                          "median": medians}), flush=True)


if __name__ == "__main__":
    main()
