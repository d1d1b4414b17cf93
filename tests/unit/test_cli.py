"""The command line: what it says without a model, and without what a command needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import __version__, cli, quality

COMMAND = [sys.executable, "-m", "kvxfer"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.summary in done.stdout


HEAVY = {
    *("numpy", "torch", "transformers", "matplotlib", "aiohttp", "kvxfer._core"),
    *("asyncio", "ssl", "http.client", "kvxfer.serving.sim", "kvxfer.agent"),
}


def test_help_imports_nothing_heavy():
    pages = [name for name in PAGES if name != "plan watch"]
    code = (
        "import io, sys; from contextlib import redirect_stdout; from kvxfer import cli\n"
        "with redirect_stdout(io.StringIO()):\n"
        f"    for name in [[], *(name.split() for name in {pages})]:\n"
        "        try: cli.main([*name, '--help'])\n"
        "        except SystemExit as end: assert end.code == 0\n"
        f"heavy = {HEAVY} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


PAGES = [*cli.COMMANDS, "bench serve", "bench run", "bench local", "plan fit", "plan watch"]


@pytest.mark.parametrize("name", PAGES)
def test_each_command_has_help_of_one_form(name):
    done = run(*name.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: kvxfer {name} ")
    status, examples = done.stdout.partition("\nexit status:\n")[2].split("\nexamples:\n")
    assert re.search(r"^  0    \S", status, re.MULTILINE)
    assert re.search(r"^  2    \S", status, re.MULTILINE)
    assert f"kvxfer {name}" in examples
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_help_is_a_command_too():
    for words in ([], ["plan", "fit"]):
        assert run("help", *words).stdout == run(*words, "--help").stdout != ""


def test_sizes_in_help_are_readable():
    assert "of a request (default 64 MiB)" in " ".join(run("gateway", "--help").stdout.split())


def test_a_port_that_is_none():
    done = run("gateway", "--decode", "http://127.0.0.1:9", "--port", "99999")
    assert done.returncode == 2
    assert "'99999' is no port" in done.stderr


def test_version():
    assert run("--version").stdout == f"kvxfer {__version__}\n"


def test_no_command_prints_help_and_fails():
    done = run()
    assert done.returncode == 2
    assert "commands:" in done.stderr
    assert done.stdout == ""


def test_unknown_command_names_those_there_are():
    done = run("qualiti", "model")
    assert done.returncode == 2
    assert "no command 'qualiti'" in done.stderr
    assert "quality" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_reach_the_command(monkeypatch):
    seen = []
    monkeypatch.setattr(quality, "main", lambda arguments: seen.append(arguments) or 7)
    assert cli.main(["quality", "folder", "--json", "--codec", "int8"]) == 7
    assert seen == [["folder", "--json", "--codec", "int8"]]


def test_interrupt_is_told(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "main", interrupted)
    assert cli.main(["quality"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_reader_that_has_enough_is_no_error():
    code = "import sys; from kvxfer import cli; sys.exit(cli.main(['quality', '--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert b"Traceback" not in error


def test_output_that_cannot_be_written():
    command = [*COMMAND, "size", "llama-3-8b"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "kvxfer: the output can't be written: No space left on device\n"
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    assert subprocess.run(shell, capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("some words")
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL"),
        (["m"], "--prompts"),
        (["m", "--prompts", "p", "--tokens", "0"], "--tokens"),
        (["m", "--prompts", "p", "--continue", "x"], "--continue"),
        (["m", "--prompts", "p", "--cache-dtype", "int4"], "int4"),
    ],
)
def test_bad_options_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit:
        quality.main(arguments)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "usage: kvxfer quality" in error
    assert said in error


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ("int7", "codec 'int7' is not known; there are"),
        ("tiered(recent=many)", "recent=many is not an integer"),
        ("auto", "measure those"),
    ],
)
def test_codecs_are_refused_before_anything_is_loaded(codec, said, text, capsys):
    assert quality.main(["nowhere", "--prompts", str(text), "--codec", codec]) == 2
    assert said in capsys.readouterr().err


def test_missing_model(tmp_path, text, capsys):
    assert quality.main([str(tmp_path / "none"), "--prompts", str(text)]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert quality.main([str(tmp_path), "--prompts", str(text)]) == 2
    assert "it has no config.json" in capsys.readouterr().err


def test_missing_model_in_a_process(tmp_path, text):
    done = run("quality", str(tmp_path / "none"), "--prompts", str(text))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no model in ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_package_says_what_to_install(missing, tmp_path, text, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    find = quality.importlib.util.find_spec
    monkeypatch.setattr(
        quality.importlib.util,
        "find_spec",
        lambda name: None if name == missing else find("json"),
    )
    assert quality.main([str(tmp_path), "--prompts", str(text)]) == 2
    error = capsys.readouterr().err
    assert f"needs {missing}," in error
    assert "-m pip install 'kvxfer[quality]'" in error


def test_plot_needs_a_folder_and_matplotlib(tmp_path, text, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(tmp_path), "--prompts", str(text), "--plot"]
    assert quality.main([*arguments, str(tmp_path / "none" / "out.png")]) == 2
    assert "can't draw" in capsys.readouterr().err
    find = quality.importlib.util.find_spec
    monkeypatch.setattr(
        quality.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find("json"),
    )
    assert quality.main([*arguments, str(tmp_path / "out.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
