"""`kvxfer size`: its formulas against the core's, its command as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import jsonschema
import numpy as np
import pytest
from hypothesis import given
from kvtest.agents import LONG, consumer, producer

import kvxfer
from kvxfer import Codec, InvalidError, _core, cli
from kvxfer.sizing.builtin import CONFIGS
from kvxfer.sizing.estimate import estimates
from kvxfer.sizing.links import NOMINAL, parse_link
from kvxfer.sizing.models import ELEMENT_BYTES, LayerGroup, Model, find_model, model_of
from kvxfer.sizing.wire import Encoding, encoding_of, panel_bytes, request_bytes

DOCS = Path(__file__).parents[3] / "docs"

GIB = 1 << 30
RAW = Codec("raw")


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer", "size", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def table(name: str, **changes) -> list:
    usual = {"tp": 1, "num_links": None, "dtypes": [], "codecs": [], "links": NOMINAL}
    return estimates(find_model(name), 32768, **{**usual, "prefill_rate": None, **changes})


def test_llama_70b_at_32k():
    half, eighth = (
        table("llama-3-70b", dtypes=["float16"])[0],
        table("llama-3-70b", dtypes=["float8_e4m3fn"])[0],
    )
    assert half.rank_bytes == 10 * GIB
    assert eighth.rank_bytes == 5 * GIB
    assert f"{half.passages[0].seconds:.1f}" == "8.6"
    assert f"{eighth.passages[0].seconds:.1f}" == "4.3"
    assert half.passages[0].link.name == "10 GbE"


@given(
    scheme=st.sampled_from(["raw", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"]),
    scale=st.sampled_from(["float32", "bfloat16"]),
    element=st.sampled_from(["float32", "float16", "bfloat16"]),
    group=st.integers(0, 300),
    rows=st.integers(1, 256),
    content=st.integers(1, 700),
)
def test_panel_bytes_are_the_core_s(scheme, scale, element, group, rows, content):
    if scheme in ("raw", "int8_channel") or group >= content:
        group = 0
    ours = panel_bytes(Encoding(scheme, scale, group), element, rows, content)
    assert ours == _core.panel_bytes((scheme, scale, group), element, rows, content)


def test_e8m0_scales_are_a_byte():
    encoding = ("fp8_e4m3", "e8m0", 32)
    assert panel_bytes(Encoding(*encoding), "bfloat16", 64, 128) == _core.panel_bytes(
        encoding, "bfloat16", 64, 128
    )


def test_elements_are_the_core_s():
    assert {name: _core.element_bytes(name) for name in ELEMENT_BYTES} == ELEMENT_BYTES


CODECS = [
    "int8",
    "fp8_e4m3",
    "fp8_e5m2(group=32, scale=e8m0)",
    "int8(panel_tokens=16, scale=float32)",
    "tiered(recent=100, sinks=4, codec=int8)",
    "tiered(recent=1000, codec=fp8_e4m3)",
]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("planes", [{"k": 64, "v": 64}, {"kv": 320}])
def test_a_fetch_sends_so_many_bytes(codec, planes):
    """What is computed is what a transfer counts, less the header of each chunk."""
    tokens, heads, block_size = 777, 2, 16
    model = Model("test", "bfloat16", (LayerGroup(3, tuple(planes.items()), heads),))
    blocks = -(-tokens // block_size)

    def cache() -> kvxfer.Cache:
        tensors = {
            f"layer.{layer}": [
                np.full((blocks, heads, block_size, content), 0x3F80 + layer, np.uint16)
                for content in planes.values()
            ]
            for layer in range(3)
        }
        return kvxfer.Cache(tensors, planes=tuple(planes), dtype="bfloat16")

    with producer("loopback") as prefill, consumer("loopback") as decode:
        offer = prefill.offer(prefill.register(cache()), range(blocks), tokens)
        fetch = decode.fetch(offer.ticket, decode.register(cache()), range(blocks), codec=codec)
        fetch.wait(LONG)
        report = fetch.report
    assert report.exceptions == 0
    expected = request_bytes(model, Codec.parse(codec), "bfloat16", tokens)
    headers = 64 * report.chunks if report.codec != "raw" else 0
    assert report.wire_bytes - headers == expected
    assert ("recent=1000" in codec) == (report.codec == "raw")  # then all tokens are recent
    assert report.bytes == request_bytes(model, RAW, "bfloat16", tokens)


def test_the_codec_s_defaults_are_by_plane_and_width():
    assert encoding_of(Codec("int8"), "k", 128).scheme == "int8_channel"
    assert encoding_of(Codec("int8"), "v", 128) == Encoding("int8", "bfloat16", 0)
    assert encoding_of(Codec("int8"), "kv", 576).group == 128
    assert encoding_of(Codec("fp8_e4m3", group=600), "v", 576).group == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_every_built_in_model_has_a_size(name):
    assert request_bytes(find_model(name), RAW, "bfloat16", 4096) > 4096


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
    ],
)
def test_names_as_hubs_have_them(name, same):
    assert find_model(name) == find_model(same)


def test_windows_bound_what_is_sent():
    model = find_model("gemma-3-27b")
    assert [(group.count, group.window) for group in model.groups] == [(10, None), (52, 1024)]
    row = 16 * 128 * 2 * 2
    expected = 10 * 32768 * row + 52 * 1023 * row
    assert request_bytes(model, RAW, "bfloat16", 32768) == expected
    assert request_bytes(model, RAW, "bfloat16", 100) == 62 * 100 * row


def test_mla_is_whole_on_each_rank():
    model = find_model("deepseek-r1")
    for tp in (1, 8, 16):
        assert request_bytes(model, RAW, "bfloat16", 1000, tp) == 61 * 576 * 2 * 1000


def test_the_indexer_s_keys_stay_8_bit():
    model = find_model("deepseek-v3.2")
    keys = 61 * 132 * 1000
    assert request_bytes(model, RAW, "bfloat16", 1000) == 61 * 576 * 2 * 1000 + keys
    coded = request_bytes(model, Codec("int8"), "bfloat16", 1000)
    assert coded > keys + 61 * 576 * 1000


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_heads_of_a_rank(tp, heads):
    assert LayerGroup(1, (("k", 1),), 8).rank_heads(tp) == heads


def test_heads_that_cannot_be_shared_out():
    with pytest.raises(InvalidError, match="8 kv heads can't be shared out evenly to 3 ranks"):
        LayerGroup(1, (("k", 1),), 8).rank_heads(3)


def test_ranks_may_share_a_link():
    own, shared = table("llama-3-70b", tp=8)[0], table("llama-3-70b", tp=8, num_links=1)[0]
    assert own.rank_bytes == shared.rank_bytes
    assert shared.passages[0].seconds == pytest.approx(8 * own.passages[0].seconds)
    assert shared.passages[0].hidden_up_to == pytest.approx(own.passages[0].hidden_up_to / 8)


def test_what_is_hidden_and_what_is_left():
    row = table("llama-3-70b")[0]
    limit = row.passages[2].hidden_up_to
    seconds = row.passages[2].seconds
    left = {
        rate: table("llama-3-70b", prefill_rate=limit * rate)[0].passages[2].exposed
        for rate in (0.5, 1.0, 2.0)
    }
    assert left[0.5] == pytest.approx(seconds / 80)  # the last layer
    assert left[1.0] == pytest.approx(seconds / 80)
    assert left[2.0] > 0.4 * seconds


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (  # heads and size from what every config has
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256},
            [(2, 4, 64, None)],
        ),
        (  # Qwen2: a window that is not used
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 256,
                "sliding_window": 32,
                "use_sliding_window": False,
            },
            [(2, 2, 64, None)],
        ),
        (  # Mistral 7B v0.1: every layer
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "head_dim": 8,
                "sliding_window": 32,
            },
            [(2, 4, 8, 32)],
        ),
        (  # layer by layer, in the text part of a multimodal model
            {
                "text_config": {
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "head_dim": 8,
                    "sliding_window": 32,
                    "layer_types": ["sliding_attention", "full_attention", "linear_attention"],
                }
            },
            [(1, 4, 8, None), (1, 4, 8, 32)],
        ),
    ],
)
def test_configs(config, groups):
    model = model_of(config, "test")
    found = [(one.count, one.kv_heads, one.planes[0][1], one.window) for one in model.groups]
    assert found == groups
    assert bool(model.notes) == ("text_config" in config)


def test_a_config_file_is_as_good_as_its_folder(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))
    done = run(str(tmp_path), "--tokens", "10", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["model"] == tmp_path.name
    assert record["rows"][0]["dtype"] == "float16"
    assert record["rows"][0]["bytes_per_rank"] == 10 * 2 * 2 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("text", "name", "rate"),
    [
        ("3.8GB/s", "3.8GB/s", 3.8e9),
        ("lab=25Gbit/s", "lab", 25e9 / 8),
        ("400Gbps", "400Gbps", 400e9 / 8),
        ("x=1e9", "x", 1e9),
    ],
)
def test_links(text, name, rate):
    link = parse_link(text)
    assert (link.name, link.bytes_per_second) == (name, pytest.approx(rate))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a MODEL"),
        (["llama-3-80b"], "llama-3-70b"),
        (["llama-3-70b", "--tokens", "0"], "'0' is not a number of tokens, as"),
        (["llama-3-70b", "--tokens", "many"], "'many' is not a number of tokens, as"),
        (["llama-3-70b", "--tp", "0"], "'0' is not a whole number from 1 on"),
        (["llama-3-70b", "--tp", "3"], "can't be shared out"),
        (["llama-3-70b", "--dtype", "int4"], "'int4' is not known"),
        (["llama-3-70b", "--dtype", "fp8", "--codec", "int8"], "travels as it is"),
        (["llama-3-70b", "--codec", "zip"], "'zip' is not known"),
        (["llama-3-70b", "--codec", "auto"], "name one"),
        (["llama-3-70b", "--link", "fast"], "write NAME=RATE"),
        (["llama-3-70b", "--prefill-rate", "-1"], "'-1' is not a number of tokens a second"),
    ],
)
def test_bad_arguments(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": [1, 2]},
        {"head_dim": "x"},
        {"num_key_value_heads": True},
        {"num_hidden_layers": 10**12},
        {"v_head_dim": -1},
        {"kv_lora_rank": 1.5},
    ],
)
def test_configs_with_something_else_for_a_number(changes):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, **changes}
    with pytest.raises(InvalidError, match=rf"test: its config's {next(iter(changes))} is "):
        model_of(config, "test")


@pytest.mark.parametrize("content", ["{", "[1]", '{"num_hidden_layers": 2}', '{"text_config": 3}'])
def test_bad_configs(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    done = run(str(path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_as_a_user_runs_it():
    done = run("llama-3-70b")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    for shown in ("10.00 GiB", "5.00 GiB", "8.59 s", "4.29 s"):
        assert shown in done.stdout
    assert run("--list").stdout.split() == list(CONFIGS)


@pytest.mark.parametrize("model", ["deepseek-v3.2", "gemma-3-4b"])
def test_json_has_its_schema(model, capsys):
    schema = json.loads((DOCS / "schemas/size.json").read_text())
    for more in ([], ["--tp", "2", "--prefill-rate", "1000", "--link", "lab=3GB/s"]):
        assert cli.main(["size", model, "--json", *more]) == 0
        jsonschema.validate(json.loads(capsys.readouterr().out), schema)


def test_the_page_shows_what_it_prints(capsys):
    page = (DOCS / "size.md").read_text()
    shown = page.partition("$ kvxfer size llama-3-70b\n")[2].partition("```")[0]
    assert cli.main(["size", "llama-3-70b"]) == 0
    assert capsys.readouterr().out == shown


def test_tables_fit_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr("kvxfer.sizing.report.columns", lambda most: 60)
    assert cli.main(["size", "llama-3-70b", "--prefill-rate", "5000"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 60 for line in shown.splitlines() if "  " in line)
    assert shown.count("NVLink 4") == shown.count("10 GbE") == 3
    for figure in ("8.59 s", "11.9 ms", "2.75M"):
        assert figure in shown


def test_it_needs_nothing_that_is_compiled():
    code = (
        "import sys; sys.modules['kvxfer._core'] = None; from kvxfer import cli; "
        "sys.exit(cli.main(['size', 'llama-3-70b', '--codec', 'int8', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_loads_little():
    code = (
        "import sys; from kvxfer import cli\n"
        "try: cli.main(['size', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'torch', 'transformers', 'kvxfer.serving'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "size" in cli.COMMANDS
