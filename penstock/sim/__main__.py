"""`python -m penstock.sim --seeds N [--start S] [--profile tasks]`: runs seeds and prints a line for each,
then which faults were injected and which invariants were checked.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from penstock.core.system_clock import SystemClock
from penstock.sim.scenario import DRAWS, run_seed
from penstock.sim.simulation import InvariantBroken


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 when a seed broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m penstock.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed")
    parser.add_argument(
        "--profile",
        choices=sorted(DRAWS),
        default="jobs",
        help="jobs: small worlds; tasks: 2 h of 30 containers",
    )
    asked = parser.parse_args(arguments)
    draw = DRAWS[asked.profile]
    clock, broken = SystemClock(), list[int]()
    begun_ms = clock.boot_ms()
    faults, evaluated, excused = Counter[str](), Counter[str](), Counter[str]()
    simulated_ms, overlap_ms = 0, 0
    for seed in range(asked.start, asked.start + asked.seeds):
        print(draw(seed).describe(), flush=True)
        try:
            report = run_seed(seed, options=draw(seed))
        except InvariantBroken as error:
            broken.append(seed)
            print(f"seed {seed}: BROKEN\n{error}", flush=True)
            continue
        print(f"  {report.line()}", flush=True)
        faults += report.faults
        evaluated += report.evaluated
        excused += report.excused
        simulated_ms += report.simulated_ms
        overlap_ms += report.overlap_ms
    _summary("faults by kind", faults)
    _summary("invariants evaluated", evaluated)
    _summary("overlaps explained by pauses or fences", excused)
    print(f"  {overlap_ms / 1000:.1f} s of overlap in total")
    wall_s = (clock.boot_ms() - begun_ms) / 1000
    print(f"{asked.seeds} seeds, {simulated_ms / 3_600_000:.1f} simulated hours in {wall_s:.0f} s")
    print(f"broken seeds: {', '.join(map(str, broken))}" if broken else "no invariant was violated")
    return 1 if broken else 0


def _summary(title: str, counts: Counter[str]) -> None:
    print(f"{title} ({sum(counts.values())}):")
    for name, count in sorted(counts.items()):
        print(f"  {count:>9} {name}")


if __name__ == "__main__":
    sys.exit(main())
