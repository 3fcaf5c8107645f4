"""List recorded runs (detkern/measure/records.py) whose sources have changed since: `python -m benchmarks.records`."""

from __future__ import annotations

import argparse
import json
import sys

from detkern.measure import records


def main() -> int:
    """List the records. Status 1 with --check where one is out of date."""
    parser = argparse.ArgumentParser(description="List recorded runs whose sources have changed since.")
    parser.add_argument("--check", action="store_true", help="end with status 1 if there is one")
    arguments = parser.parse_args()
    stale = 0
    for record in sorted(records.RESULTS.glob("*/*.json")):
        made = json.loads(record.read_text())
        changed = records.changed_sources(record)
        stale += bool(changed)
        state = f"changed since: {', '.join(changed)}" if changed else "up to date"
        print(f"{record.relative_to(records.RESULTS)}  {made['date'][:10]}  {state}")
    return int(arguments.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
