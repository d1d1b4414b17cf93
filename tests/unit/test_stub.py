"""The type stub of the extension and the extension itself name the same things."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvxfer import _core

REPOSITORY = Path(__file__).resolve().parents[2]
STUB = ast.parse((REPOSITORY / "kvxfer" / "_core.pyi").read_text())

# Name, parameters as (name, keyword only, has a default), by "Class.method" or "function".
Signatures = dict[str, list[tuple[str, bool, bool]]]


def _parameters(function: ast.FunctionDef) -> list[tuple[str, bool, bool]]:
    given = function.args
    assert given.vararg is None, function.name
    assert given.kwarg is None, function.name
    positional = [*given.posonlyargs, *given.args]
    without = len(positional) - len(given.defaults)
    found = [(arg.arg, False, i >= without) for i, arg in enumerate(positional)]
    found += [
        (arg.arg, True, default is not None)
        for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return [parameter for parameter in found if parameter[0] != "self"]


def _is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)


def _public(body: list[ast.stmt]) -> list[ast.stmt]:
    return [
        node
        for node in body
        if not (
            isinstance(node, ast.ClassDef | ast.FunctionDef)
            and node.name.startswith("_")
            and node.name != "__init__"
        )
    ]


def _stub_attributes(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef) and _is_property(node):
            names.add(node.name)
    return names


def _stub_signatures(body: list[ast.stmt], prefix: str = "") -> Signatures:
    found: Signatures = {}
    for node in _public(body):
        if isinstance(node, ast.ClassDef):
            found |= _stub_signatures(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not _is_property(node):
            found[prefix + node.name] = _parameters(node)
    return found


def _module_signatures(owner: ModuleType | type, prefix: str = "") -> Signatures:
    """Signatures as the first line of each docstring tells them, which pybind11 writes."""
    found: Signatures = {}
    for name, value in vars(owner).items():
        if inspect.isclass(value):
            found |= _module_signatures(value, f"{name}.")
        elif callable(getattr(owner, name)) and (not name.startswith("_") or name == "__init__"):
            line = (getattr(owner, name).__doc__ or "").split("\n")[0]
            if not line.startswith(f"{name}("):
                continue  # object's __init__: it cannot be made from Python
            function = ast.parse(f"def {line}: ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            found[prefix + name] = _parameters(function)
    return found


def _classes() -> dict[str, type]:
    return {name: value for name, value in vars(_core).items() if inspect.isclass(value)}


def test_the_same_classes():
    stubbed = {node.name for node in _public(STUB.body) if isinstance(node, ast.ClassDef)}
    assert stubbed == set(_classes())


def test_the_same_functions_with_the_same_parameters():
    stubbed, built = _stub_signatures(STUB.body), _module_signatures(_core)
    assert set(stubbed) == set(built)
    for name, parameters in stubbed.items():
        assert parameters == built[name], name


@pytest.mark.parametrize("name", sorted(_classes()))
def test_the_same_attributes(name: str):
    node = next(n for n in STUB.body if isinstance(n, ast.ClassDef) and n.name == name)
    built = {
        attribute
        for attribute, value in vars(_classes()[name]).items()
        if isinstance(value, property)
    }
    assert _stub_attributes(node.body) == built


@pytest.mark.parametrize("name", sorted(_classes()))
def test_what_can_be_set_is_what_the_stub_annotates(name: str):
    node = next(n for n in STUB.body if isinstance(n, ast.ClassDef) and n.name == name)
    annotated = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    settable = {
        attribute
        for attribute, value in vars(_classes()[name]).items()
        if isinstance(value, property) and value.fset is not None
    }
    assert annotated == settable


def test_values_have_the_types_that_the_stub_names():
    simple = {"str": str, "int": int, "float": float, "bool": bool}
    for name in ("AgentOptions", "LoopbackFaults"):
        made = _classes()[name]()
        node = next(n for n in STUB.body if isinstance(n, ast.ClassDef) and n.name == name)
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                assert isinstance(item.annotation, ast.Name)
                value = getattr(made, item.target.id)
                assert type(value) is simple[item.annotation.id], (name, item.target.id)
    assert type(_core.__version__) is str


def test_build_info_has_the_keys_of_the_stub():
    fields = {
        node.name: _stub_attributes(node.body)
        for node in STUB.body
        if isinstance(node, ast.ClassDef) and node.name in ("_BuildInfo", "_BackEnd")
    }
    info = _core.build_info()
    assert set(info) == fields["_BuildInfo"]
    for back_end in info["back_ends"].values():
        assert set(back_end) == fields["_BackEnd"]
        assert back_end["state"] in ("on", "off")


def test_stubtest_agrees():
    pytest.importorskip("mypy", reason="mypy is not installed: make types installs it")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--concise", "kvxfer._core"],
        cwd=REPOSITORY,
        env={**os.environ, "MYPYPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    # pybind11's metaclass is none of the callers' business, and a class that cannot be made from
    # Python has object's __init__.
    expected = ("metaclass differs", "__init__ is inconsistent, stub does not have *args parameter")
    faults = [
        line
        for line in (checked.stdout + checked.stderr).splitlines()
        if line and not any(text in line for text in expected)
    ]
    assert not faults, "\n".join(faults)
