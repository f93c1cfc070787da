"""What may depend on what: the core on no plugin nor on itself by name, the engine not on Python, nobody on torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "surogate_core"
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
EXAMPLE = ROOT / "examples" / "third-party-family"

MAX_LINES = 600
MAX_COLUMNS = 130  # 120 is aimed at
# Too heavy to pay for at import time; whoever uses one imports it where it is used.
HEAVY = {"transformers", "datasets", "peft", "matplotlib", "pandas", "pyarrow"}


def shipped_python() -> list[Path]:
    """The Python files of the core, of our plugins and of the example plugin; not their tests."""
    files = list(CORE.rglob("*.py"))
    for folder in [*PLUGINS, EXAMPLE]:
        files += [path for path in folder.rglob("*.py") if "tests" not in path.relative_to(folder).parts]
    return sorted(path for path in files if "build" not in path.parts)


def sources() -> list[Path]:
    """Every source file that a person wrote."""
    folders = [CORE, ROOT / "native", ROOT / "plugins", ROOT / "examples", ROOT / "tests", ROOT / "benchmarks"]
    found = [path for folder in folders for path in folder.rglob("*")]
    suffixes = {".py", ".cpp", ".h", ".cu", ".cuh"}
    return sorted(path for path in found if path.suffix in suffixes and "build" not in path.parts)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path, at_import_time: bool = False) -> list[tuple[int, str]]:
    """(line, top-level package) of each absolute import; those that run when the file is imported, if asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.lineno, node.module.split(".")[0]))
        deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        if not (at_import_time and deferred):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree)
    return found


def offenders(files: list[Path], forbidden: set[str], at_import_time: bool = False) -> list[str]:
    return [
        f"{relative(path)}:{line} imports {package}"
        for path in files
        for line, package in imports(path, at_import_time)
        if package in forbidden
    ]


def test_the_core_names_itself_nowhere_in_an_import():
    """Relative imports only: a copy under another name must not reach back to this one."""
    assert not offenders(sorted(CORE.rglob("*.py")), {"surogate_core"})


def test_the_core_imports_no_plugin():
    plugins = {path.parent.name for folder in [*PLUGINS, EXAMPLE] for path in folder.glob("*/__init__.py")}
    plugins |= {folder.name.replace("-", "_") for folder in PLUGINS}
    assert "surogate_llama" in plugins
    assert not offenders(sorted(CORE.rglob("*.py")), plugins)


def test_nothing_shipped_imports_torch():
    assert not offenders(shipped_python(), {"torch", "tensorflow", "jax"})


def test_heavy_packages_are_imported_where_they_are_used():
    assert not offenders(shipped_python(), HEAVY, at_import_time=True)


def test_a_plugin_uses_only_itself_and_the_core():
    for folder in [*PLUGINS, EXAMPLE]:
        own = {path.parent.name for path in folder.glob("*/__init__.py")}
        foreign = {other.name.replace("-", "_") for other in PLUGINS} - own
        assert not offenders([path for path in shipped_python() if folder in path.parents], foreign)


ENVIRONMENT = re.compile(r"\bos\.(environ|getenv)\b|\b(secure_)?getenv\s*\(|from os import .*\b(environ|getenv)\b")
# Where the environment is the subject and not a knob: `${NAME}` in a configuration file stands for the user's value.
ENVIRONMENT_READERS = {"surogate_core/config/yaml_file.py"}


def test_no_setting_comes_from_the_environment():
    files = shipped_python() + [path for path in sources() if (ROOT / "native") in path.parents]
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in files
        if relative(path) not in ENVIRONMENT_READERS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ENVIRONMENT.search(line)
    ]
    assert not found


def test_the_engine_and_the_backends_know_no_python():
    """Only native/bindings does. Families and file formats are above the engine as well."""
    folders = [ROOT / "native" / "engine", ROOT / "native" / "backends", ROOT / "native" / "include"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".h", ".cpp", ".txt"}]
    assert files
    pattern = re.compile(r"Python\.h|\bPyObject\b|nanobind|pybind11|\bllama\b|safetensors", re.IGNORECASE)
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_files_are_short_and_lines_fit():
    found = []
    for path in sources():
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MAX_LINES:
            found.append(f"{relative(path)} has {len(lines)} lines")
        found += [f"{relative(path)}:{n} has {len(x)} columns" for n, x in enumerate(lines, 1) if len(x) > MAX_COLUMNS]
    assert not found


def test_python_files_postpone_annotations():
    """A file that defines something does; one that only hands on names has no annotations."""
    missing = []
    for path in shipped_python():
        text = path.read_text(encoding="utf-8")
        if re.search(r"^\s*(def|class) ", text, re.MULTILINE) and "from __future__ import annotations" not in text:
            missing.append(relative(path))
    assert not missing


@pytest.mark.parametrize("module", ["surogate_core", "surogate_core.plugins", "surogate_core.cli"])
def test_imports_are_cheap(module):
    """The core, its plugin manager and its command come up without the engine, numpy or any heavy package."""
    program = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(loaded.stdout.split()) & (HEAVY | {"torch", "numpy", "tokenizers", "gguf"})


@pytest.mark.parametrize("folder", [ROOT, EXAMPLE, *PLUGINS], ids=lambda path: path.name)
def test_every_distribution_is_complete(folder):
    import tomllib

    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0" and project["requires-python"] == ">=3.11"
    assert (folder / "README.md").is_file()
    if folder != ROOT:
        assert "surogate" in project["entry-points"], "it registers through the entry-point group `surogate`"
        assert any(name.startswith("surogate-core") for name in project["dependencies"])
        assert (folder / "tests").is_dir()


def test_links_between_pages_lead_somewhere():
    ours = [ROOT / folder for folder in (".", "docs", "docs/plugins", "examples", "benchmarks")]
    folders = [*ours, EXAMPLE, *PLUGINS]
    dead = []
    for page in [page for folder in folders for page in folder.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                dead.append(f"{relative(page)} links to {target}")
    assert not dead
