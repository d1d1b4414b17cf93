"""Checks who includes and imports whom, the arrows of docs/architecture.md.

Also that nothing in csrc/ is `thread_local`: the C library makes such objects when a thread first
touches them, and ends the process where there is no memory for that.

Prints one `file:line: what (rule)` per violation and exits with 1 when there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# What a layer may include besides itself.
LAYERS = {
    "base": set(),
    "layout": {"base"},
    "codec": {"base"},
    "device": {"base"},
    "wire": {"base"},
    "pack": {"base", "layout", "codec", "device"},
    "transport": {"base", "device", "wire"},
    "engine": {"base", "layout", "codec", "device", "wire", "pack", "transport"},
}
# The layer that each public header, csrc/include/kvxfer/*.h, belongs to.
PUBLIC_HEADERS = {
    "status.h": "base",
    "digest.h": "base",
    "element.h": "base",
    "layout.h": "layout",
    "copy_plan.h": "layout",
    "codec.h": "codec",
    "panel_plan.h": "pack",
    "pack.h": "pack",
    "transport.h": "transport",
    "ucx.h": "transport",
    "verbs.h": "transport",
    "trace.h": "engine",
    "agent.h": "engine",
}
# What pure Python in kvxfer/serving/ may use of the rest of the package.
SERVING_MAY_IMPORT = ("kvxfer.serving", "kvxfer.errors", "kvxfer._help")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
PYTHON_SIDE = re.compile(r"(Python\.h$|pybind11/|torch/|ATen/|c10/)")
CXX_SUFFIXES = {".h", ".cc", ".hip", ".cu"}


class Checker:
    """Collects the violations found in the tree below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = 0
        self.violations: list[str] = []

    def run(self) -> None:
        for path in self._files("csrc", CXX_SUFFIXES):
            self._check_core_file(path)
        for path in self._files("bindings", CXX_SUFFIXES):
            self._check_binding(path)
        for folder in ("kvxfer", "integrations", "benches", "tools"):
            for path in self._files(folder, {".py", ".pyi"}):
                self._check_python(path)

    def _files(self, folder: str, suffixes: set[str]) -> Iterator[Path]:
        for path in sorted((self.root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                self.files += 1
                yield path

    def _report(self, path: Path, line: int, what: str, rule: str) -> None:
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {what} ({rule})")

    def _includes(self, path: Path) -> Iterator[tuple[int, bool, str]]:
        text = path.read_text()
        for match in INCLUDE.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            yield line, match[1] == "<", match[2]

    def _layer_of(self, header: str) -> str | None:
        """Layer of an include written by path from csrc/ or csrc/include/, None if it has none."""
        folder, _, rest = header.partition("/")
        if folder == "kvxfer":
            return PUBLIC_HEADERS.get(rest)
        return folder if rest and folder in LAYERS else None

    def _check_core_file(self, path: Path) -> None:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\bthread_local\b|\b__thread\b", line.partition("//")[0]):
                rule = "where there is no memory for it the C library ends the process"
                self._report(path, number, "has a thread_local object", rule)
        inside = path.relative_to(self.root / "csrc")
        public = inside.parts[0] == "include"
        own = PUBLIC_HEADERS.get(inside.name) if public else inside.parts[0]
        if own not in LAYERS:
            rule = "a public header is named with its layer in tools/check_layers.py"
            if not public:
                rule = "csrc/ has the layers " + ", ".join(LAYERS)
            self._report(path, 1, f"{inside} belongs to no layer", rule)
            return
        for line, system, header in self._includes(path):
            if PYTHON_SIDE.search(header):
                self._report(path, line, f"includes {header}", "csrc knows nothing of Python")
            if system and not header.startswith("kvxfer/"):
                continue
            layer = self._layer_of(header)
            if layer is None:
                rule = "includes are written by path from csrc/, or kvxfer/ and a public header"
                self._report(path, line, f'includes "{header}"', rule)
            elif public and not header.startswith("kvxfer/"):
                rule = "public headers include public headers only"
                self._report(path, line, f'includes "{header}"', rule)
            elif layer != own and layer not in LAYERS[own]:
                allowed = ", ".join(sorted(LAYERS[own])) or "nothing"
                rule = f"{own} may include {allowed} besides itself"
                self._report(path, line, f'{own} includes {layer} ("{header}")', rule)

    def _check_binding(self, path: Path) -> None:
        rule = "bindings include csrc/include, their own headers, pybind11 and the standard library"
        for line, system, header in self._includes(path):
            if system:
                allowed = "/" not in header or header.startswith(("pybind11/", "kvxfer/", "sys/"))
            else:
                allowed = header.startswith("kvxfer/") or (path.parent / header).is_file()
            if header.startswith("kvxfer/"):
                allowed = (self.root / "csrc" / "include" / header).is_file()
            if not allowed:
                self._report(path, line, f"includes {header}", rule)

    def _imports(self, path: Path) -> Iterator[tuple[int, str]]:
        """Absolute names of everything imported; `from a import b` yields a and a.b."""
        inside = path.relative_to(self.root).with_suffix("")
        parts = list(inside.parts)
        if parts[0] == "integrations":
            parts.insert(0, "kvxfer")  # the name that it is installed under
        package = parts[:-1]
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = node.module.split(".") if node.module else []
                if node.level:
                    base = package[: len(package) - node.level + 1] + base
                yield node.lineno, ".".join(base)
                for alias in node.names:
                    yield node.lineno, ".".join([*base, alias.name])

    def _check_python(self, path: Path) -> None:
        inside = path.relative_to(self.root)
        folder = inside.parts[0]
        in_serving = inside.parts[:2] == ("kvxfer", "serving")
        may_import_vllm = inside.parts[:2] == ("integrations", "vllm_connector")
        seen: set[tuple[int, str]] = set()

        def report(line: int, name: str, rule: str) -> None:
            if (line, rule) not in seen:
                seen.add((line, rule))
                self._report(path, line, f"imports {name}", rule)

        for line, name in self._imports(path):
            if folder == "kvxfer":
                for upper in ("integrations", "kvxfer.integrations", "benches", "tests"):
                    if within(name, upper):
                        report(line, name, "kvxfer/ knows nothing of what is built on it")
            if folder == "integrations" and (within(name, "benches") or within(name, "tests")):
                report(line, name, "integrations/ knows nothing of benches and tests")
            if within(name, "vllm") and not may_import_vllm:
                report(line, name, "only integrations/vllm_connector/ imports vLLM")
            if in_serving and within(name, "kvxfer") and not may_serving_import(name):
                report(line, name, "kvxfer/serving/ knows nothing of transports or the core")


def may_serving_import(name: str) -> bool:
    """Whether pure Python in kvxfer/serving/ may use this part of the package."""
    # `from .. import x` yields the bare package too: what counts is kvxfer.x.
    return name == "kvxfer" or any(within(name, allowed) for allowed in SERVING_MAY_IMPORT)


def within(name: str, package: str) -> bool:
    """Whether `name` is the package or lies in it."""
    return name == package or name.startswith(package + ".")


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    checker = Checker(root)
    checker.run()
    for violation in checker.violations:
        print(violation)
    if checker.violations:
        print(f"layers: {len(checker.violations)} violation(s) in {checker.files} files")
        return 1
    print(f"layers: {checker.files} files, every arrow as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
