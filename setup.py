"""Builds kvxfer._core by handing the options to CMake; everything else stands in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Read from the environment, passed on as CMake cache variables of the same name.
OPTIONS = {
    "KVXFER_WITH_UCX": "auto",
    "KVXFER_WITH_VERBS": "auto",
    "KVXFER_WITH_HIP": "auto",
    "KVXFER_WITH_CUDA": "auto",
    "KVXFER_SANITIZE": "",
    "KVXFER_WERROR": "OFF",
}


class CMakeBuild(build_ext):
    """Builds the CMake target _core and copies it to where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11  # a build requirement: not importable when metadata alone is asked for

        target = Path(self.get_ext_fullpath(ext.name))
        # A stable place of our own: setuptools' build_temp is a fresh directory for an editable
        # install, which would compile everything anew each time.
        default_dir = ROOT / "build" / f"pip-{sys.implementation.cache_tag}"
        build_dir = Path(os.environ.get("KVXFER_BUILD_DIR", default_dir))
        options = {name: os.environ.get(name, default) for name, default in OPTIONS.items()}
        build_type = "RelWithDebInfo" if options["KVXFER_SANITIZE"] else "Release"
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or len(os.sched_getaffinity(0))

        configure = ["cmake", "-S", ROOT, "-B", build_dir, "-G", "Ninja"]
        configure += [f"-DCMAKE_BUILD_TYPE={build_type}", f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        # Said each time, because the tree outlives the isolated environment that ninja came from.
        configure += [f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        build = ["cmake", "--build", build_dir, "--target", "_core", "--parallel", str(jobs)]
        subprocess.run(configure, check=True)
        subprocess.run(build, check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(build_dir) / "python" / "kvxfer" / target.name, target)


integrations = ["kvxfer.integrations"]
integrations += [f"kvxfer.integrations.{name}" for name in find_packages("integrations")]

setup(
    packages=find_packages(include=["kvxfer", "kvxfer.*"]) + integrations,
    package_dir={"kvxfer": "kvxfer", "kvxfer.integrations": "integrations"},
    ext_modules=[Extension("kvxfer._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
