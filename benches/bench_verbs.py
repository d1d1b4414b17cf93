"""The verbs transport beside perftest and UCX, over soft-RoCE in the guest of tools/rdma_rig.sh.

See README.md for what each figure means.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from kvbench import host, rdma
from kvbench.measure import Report
from kvbench.native import Native
from kvbench.settings import Measurement, Settings

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS: dict[str, Measurement] = {
    "write_1MiB": rdma.write_1mib,
    "write_16KiB_list": rdma.write_16kib,
    "write_16KiB_direct": rdma.write_16kib_direct,
    "fetch_packed_16KiB_runs": rdma.fetch_packed,
}


def enter_rig() -> int:
    """Run this again in the guest, whose two rails are those of tests/verbs/rig.sh."""
    rig = ROOT / "tools" / "rdma_rig.sh"
    check = subprocess.run([rig, "--check"], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        print(f"skipped: no soft-RoCE here. {check.stderr.strip()}", file=sys.stderr)
        return 0
    subprocess.run(
        ["cmake", "--build", "build/release", "--target", "kvxfer_verbs_writes"],
        cwd=ROOT,
        stdout=sys.stderr,
        check=True,
    )
    return subprocess.run(
        [rig, "tests/verbs/rig.sh", "run", sys.executable, *sys.argv], cwd=ROOT, check=False
    ).returncode


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", action="append", choices=sorted(MEASUREMENTS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a look, not figures")
    arguments = parser.parse_args()
    if "KVXFER_TEST_VERBS" not in os.environ:
        return enter_rig()
    settings = Settings(Native(), "thp", arguments.quick)
    report = Report(arguments.json)
    report.env({**host.stamp(), "quick": settings.quick})
    for name in arguments.only or MEASUREMENTS:
        report.add(MEASUREMENTS[name](settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
