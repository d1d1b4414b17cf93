"""Reading traces: every format, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvxfer.errors import InvalidError
from kvxfer.serving.traces import read_served, read_trace
from kvxfer.serving.workload import Job, Workload, empirical, fixed, generate, lognormal

MOONCAKE = [
    {"timestamp": 500, "input_length": 1_200, "output_length": 7, "hash_ids": [1, 2, 3]},
    {"timestamp": 2_500, "input_length": 1_024, "output_length": 9, "hash_ids": [1, 2]},
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(
    ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"]
)
LCP = """trace,agent,t_s,type,in_tokens,out_tokens,cached_tokens_lcp,api_time_s
a,main,0.0,n,200,5,0,1
a,main,3.0,n,330,5,192,1
b,main,4.0,n,200,5,0,1
a,main,5.0,n,400,5,256,1
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def lines(rows) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def test_mooncake(tmp_path) -> None:
    workload = read_trace(write(tmp_path / "t.jsonl", lines(MOONCAKE)))
    # The last id of the first stands for a block that is not full, and can't be shared.
    assert workload.jobs == (Job(0.0, 1_200, 7, (1, 2)), Job(2.0, 1_024, 9, (1, 2)))
    assert workload.block_tokens == 512


def test_azure(tmp_path) -> None:
    first, second = read_trace(write(tmp_path / "t.csv", AZURE)).jobs
    assert (first.prompt_tokens, first.output_tokens, second.prompt_tokens) == (4_808, 10, 3_180)
    assert second.time == pytest.approx(0.052)


def test_vidur(tmp_path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,2\n0.5,20,3\n"
    workload = read_trace(write(tmp_path / "t.csv", text))
    assert workload.jobs == (Job(0.0, 10, 2), Job(0.5, 20, 3))


def test_conversations_share_what_the_trace_says(tmp_path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(LCP.encode()))
    workload = read_trace(path)
    one, two, other, three = (job.blocks for job in workload.jobs)
    assert workload.block_tokens == 64
    assert [len(ids) for ids in (one, two, three)] == [3, 5, 6]
    assert two[:3] == one
    assert three[:4] == two[:4]
    assert three[4] not in two
    assert not set(other) & set(one + two + three)


def test_vllm_bench(tmp_path) -> None:
    result = {
        "request_rate": 4.0,
        "input_lens": [10, 20],
        "output_lens": [3, 1],
        "ttfts": [0.1, 0.2],
        "itls": [[0.01, 0.02], []],
    }
    path = write(tmp_path / "bench.json", json.dumps(result))
    assert read_trace(path).jobs == (Job(0.0, 10, 3), Job(0.25, 20, 1))
    first, _ = read_served(path)
    assert (first.first, first.last) == pytest.approx((0.1, 0.13))


def test_request_log(tmp_path) -> None:
    row = {
        "arrival_time": 1e9,
        "input_toks": 5,
        "output_toks": 6,
        "scheduled_ts": 3.0,
        "first_token_ts": 3.5,
        "last_token_ts": 4.0,
    }
    path = write(tmp_path / "log.jsonl", lines([row]))
    assert read_trace(path).jobs == (Job(0.0, 5, 6),)
    (served,) = read_served(path)
    assert (served.scheduled, served.first, served.last) == (3.0, 3.5, 4.0)


def test_requests_without_an_answer_are_left_out_and_the_rest_sorted(tmp_path) -> None:
    rows = [MOONCAKE[1], {**MOONCAKE[0], "output_length": 0}, MOONCAKE[0]]
    workload = read_trace(write(tmp_path / "t.jsonl", lines(rows)))
    assert [job.prompt_tokens for job in workload.jobs] == [1_200, 1_024]
    assert len(read_trace(tmp_path / "t.jsonl", limit=1).jobs) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("a,b\n1,2\n", "no format known here.*a, b"),
        (lines(MOONCAKE) + '{"timestamp": 3}\n', r":3: KeyError"),
        (lines(MOONCAKE) + "{broken\n", r":3: "),
        (lines(MOONCAKE) + "[1]\n", r":3: .*no request"),
        (lines([MOONCAKE[0], {**MOONCAKE[1], "output_length": -4}]), r":2: ValueError"),
        (lines([{**MOONCAKE[0], "output_length": 0}]), "no request with both"),
        (AZURE + "\nyesterday,1,1\n", r":4: ValueError"),
        (AZURE + "\n2023-11-16 18:17:05,,5\n", r":4: ValueError"),
        ('{"input_lens": [1, 2], "output_lens": [1]}', "save-detailed"),
    ],
)
def test_traces_with_holes(tmp_path, text, message) -> None:
    with pytest.raises(InvalidError, match=message):
        read_trace(write(tmp_path / "trace", text))


def test_a_trace_that_is_not_there(tmp_path) -> None:
    with pytest.raises(InvalidError, match="can't read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InvalidError, match="no text"):
        read_trace(tmp_path / "binary")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1_000)[:20])
    with pytest.raises(InvalidError):
        read_trace(tmp_path / "cut.gz")


def test_rates() -> None:
    workload = generate(5_000, 4.0, lognormal(500, 0.8, 4_000), empirical([10, 30]), seed=2)
    assert workload.rate == pytest.approx(4.0, rel=0.05)
    assert workload.prompt_mean == pytest.approx(500, rel=0.05)
    assert workload.output_mean == pytest.approx(20, rel=0.05)
    twice = workload.at_rate(8.0)
    assert twice.rate == pytest.approx(8.0)
    assert [job.prompt_tokens for job in twice.jobs] == [j.prompt_tokens for j in workload.jobs]
    assert workload.poisson(2.0, seed=1).rate == pytest.approx(2.0, rel=0.05)
    assert workload.poisson(2.0, seed=1) == workload.poisson(2.0, seed=1)
    assert max(job.prompt_tokens for job in workload.jobs) <= 4_000
    with pytest.raises(InvalidError, match="at once"):
        _ = Workload((Job(0.0, 1, 1), Job(0.0, 1, 1))).rate
    with pytest.raises(InvalidError):
        generate(10, 0.0, fixed(1), fixed(1))
