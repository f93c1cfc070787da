"""The core copied, with its native library, into another package under another name: it imports, runs and trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import surogate_core

CORE = Path(surogate_core.__file__).parent
NAME = "acme._vendor.engine_core"

# Whoever reaches back to the public core by name is stopped, though it is installed beside the copy.
PREAMBLE = """
import sys

class NoPublicCore:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "surogate_core":
            raise ImportError(f"a vendored core imports {name}")

sys.meta_path.insert(0, NoPublicCore())
sys.path.insert(0, sys.argv[1])
"""


@pytest.fixture(scope="module")
def vendored(tmp_path_factory) -> Path:
    """A folder holding the package `acme`, with a copy of the core inside."""
    root = tmp_path_factory.mktemp("vendored")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CORE, root.joinpath(*NAME.split(".")), ignore=ignore)
    for package in ("acme", "acme/_vendor"):
        (root / package / "__init__.py").touch()
    return root


def run(root: Path, program: str, *arguments: str) -> str:
    source = PREAMBLE + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source, str(root), *arguments], capture_output=True, text=True, cwd=root, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_under_the_new_name(vendored):
    output = run(
        vendored,
        f"""
        import importlib, pkgutil
        package = importlib.import_module("{NAME}")
        names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        print(*names, sep="\\n")
        """,
    )
    names = output.split()
    assert f"{NAME}._native" in names and f"{NAME}.plugins.manager" in names and len(names) > 20


def test_the_copy_runs_kernels_of_its_own_library(vendored):
    output = run(
        vendored,
        f"""
        import numpy
        from {NAME} import engine
        x = numpy.linspace(-1, 1, 64, dtype=numpy.float32).reshape(4, 16)
        weight, y, rstd = numpy.ones(16, "f4"), numpy.empty_like(x), numpy.empty(4, "f4")
        engine.run_op("rms_norm", [x, weight], [y, rstd], {{"eps": 0.0}})
        numpy.testing.assert_allclose((y * y).mean(axis=1), 1.0, rtol=1e-5)
        print(*(library["origin"] for library in engine.libraries()))
        """,
    )
    assert all(Path(origin).is_relative_to(vendored) for origin in output.split()) and output.strip()


def test_the_copy_listens_to_entry_points_of_its_own(vendored):
    """Plugins installed for the public core are made of its classes, not of the copy's."""
    output = run(
        vendored,
        f"""
        from {NAME}.plugins import get_manager
        from {NAME}.plugins.manager import ENTRY_POINT_GROUP
        print(ENTRY_POINT_GROUP, [report.distribution for report in get_manager().report()])
        """,
    )
    assert output.strip() == f"{NAME} ['{NAME}']"
