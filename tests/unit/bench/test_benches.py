"""The parts of benches/ that turn measurements into figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def benches(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benches")


def contender(name: str, lasts: int, **settings: bool):
    from kvbench.measure import Contender

    turns = iter(range(lasts))

    def run() -> list[float]:
        if next(turns, None) is None:
            raise RuntimeError("it has ended")
        return [0.5]

    return Contender(name, run, **settings)


def test_a_rival_that_ends_leaves_the_others_theirs(monkeypatch):
    from kvbench.measure import Patience, interleave

    monkeypatch.setattr(Patience, "left_s", 0.0)
    measured = interleave([contender("ours", 99), contender("rival", 3, rival=True)], 6)
    assert measured.failed == {"rival": "it has ended"}
    assert measured.series.keys() == {"ours"}
    assert measured.series["ours"].seconds == [0.5] * 6
    with pytest.raises(RuntimeError, match="it has ended"):
        interleave([contender("ours", 3), contender("rival", 99, rival=True)], 6)


def test_a_slow_rival_ends_the_turns_early(monkeypatch):
    from kvbench import measure

    monkeypatch.setattr(measure.Patience, "left_s", 0.0)
    monkeypatch.setattr(measure, "MOST_SECONDS", 0.0)
    measured = measure.interleave([contender("ours", 99)], 50)
    assert len(measured.series["ours"].samples) == measure.FEWEST


def line(name: str, baseline: str, ratio: float, value: float = 4.0, **more: object) -> dict:
    compared = {"baseline": baseline, "ratio": ratio, "baseline_value": value / ratio}
    return {"name": name, "value": value, "unit": "GB/s", "n": 5, **compared, **more}


def test_pages_have_what_was_measured(tmp_path):
    from kvbench import page, readme

    env = {
        "name": "env", "time": "2026-01-02T03:04:05Z", "cpu": "some CPU", "cores": 2,
        "commit": "c0", "kernel": "6", "thp": "madvise", "shmem_thp": "never", "load": [0.1],
        "bytes": 1 << 28,
        "versions": {"kvxfer": "0", "python": "3", "libc": "glibc"},
    }  # fmt: skip
    costs = {"kvxfer": [0.1, 0.2], "nixl": [0.3, 0.4]}
    idle = {"kvxfer": [0.0, 0.0001], "nixl": [0.0, 1.0]}
    lines = [
        env,
        {"name": "rival", "rival": "NIXL", "version": "1", "why": ""},
        line("fetch_shm", "memcpy, 1 thread", 1.07),
        line("fetch_shm", "nixl posix", 1.13, cpu_s_per_gb=costs, idle_cores=idle, noisy=True),
        {"name": "fetch_tcp", "failed": "ChildError: gone"},
    ]
    (tmp_path / "benchmarks.md").write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write(lines, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert (text[:7], text[-7:], "old" in text) == ("before\n", "\nafter\n", False)
    assert "| shared memory, 16 KiB blocks | 4* | nixl posix | 3.54 | 1.13 |" in text
    assert "failed: ChildError: gone" in text

    (tmp_path / "README.md").write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    readme.write(lines, tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert (text[:7], text[-7:], "old" in text) == ("before\n", "\nafter\n", False)
    assert "| 4.0 GB/s | 1.07 of one thread's memcpy of the same runs; 1.13 of NIXL" in text
    assert "| 0.10 + 0.20 s/GB | NIXL 0.30 + 0.40 s/GB |" in text
    assert "with 1 of its lines disturbed" in text
    assert "TCP" not in text  # it was not measured
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        readme.write(lines, tmp_path / "README.md")


def test_the_readme_and_the_page_have_their_marks():
    from kvbench import page, readme

    for path, marks in (("README.md", readme), ("docs/benchmarks.md", page)):
        text = (ROOT / path).read_text()
        assert text.index(marks.BEGIN) < text.index(marks.END)


@pytest.mark.parametrize("script", ["bench_suite.py", "bench_transfer.py", "bench_codec.py"])
def test_scripts_say_what_they_measure(script):
    done = subprocess.run(
        [sys.executable, ROOT / "benches" / script, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--only" in done.stdout
