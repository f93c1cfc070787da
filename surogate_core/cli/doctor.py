"""`surogate doctor`: what this machine and this installation can do, and what is in the way."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import __version__
from ..errors import SurogateError
from .console import output_console

State = Literal["ok", "note", "bad"]

_DEPENDENCIES = ("numpy", "pydantic", "tokenizers", "safetensors", "gguf", "jinja2")
_MARKS: dict[State, tuple[str, str]] = {"ok": ("ok", "green"), "note": ("--", "yellow"), "bad": ("!!", "bold red")}
_SMALL_DISK = 5 * 2**30


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and whether it is in the way of a run."""

    subject: str
    found: str
    state: State = "ok"


def doctor(
    folder: Annotated[Path, typer.Option("--output-dir", help="The folder that a run would write to.")] = Path("."),
) -> None:
    """Check this machine: Python, engine, CPU, kernel libraries, oneDNN, GPU, memory, disk, plugins."""
    console = output_console()
    findings: list[Finding] = []
    for check in (_python, _engine, _onednn, _gpu, _gpu_kernels, _memory, lambda: _disk(folder), _plugins):
        findings += _guarded(check)
    for finding in findings:
        mark, style = _MARKS[finding.state]
        console.print(mark, style=style, end=" ")
        console.print(f"{finding.subject}: {finding.found}", soft_wrap=True)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings; where even looking fails, that is the finding."""
    try:
        return check()
    except SurogateError as error:
        return [Finding(check.__name__.strip("_"), " ".join(str(error).split()), "bad")]


def _python() -> list[Finding]:
    import importlib_metadata

    versions = []
    for name in _DEPENDENCIES:
        try:
            versions.append(f"{name} {importlib_metadata.version(name)}")
        except importlib_metadata.PackageNotFoundError:
            return [Finding("python packages", f"{name} is missing: reinstall surogate-core", "bad")]
    return [
        Finding("surogate", f"{__version__}, in {Path(__file__).resolve().parents[1]}"),
        Finding("python", f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"),
        Finding("python packages", ", ".join(versions)),
    ]


def _engine() -> list[Finding]:
    from .. import engine
    from ..engine import cuda

    engine.load()
    features = engine.cpu_features()
    present = [name for name, has in features.items() if has]
    simd = Finding("cpu", f"{os.cpu_count()} cores; {' '.join(present) or 'no vector features the kernels use'}")
    ours = {cuda.LIBRARY.name, cuda.CUDNN_LIBRARY.name}  # `_gpu` tells of these
    return [simd, *(_library(each) for each in engine.libraries() if Path(each["origin"]).name not in ours)]


def _library(library: dict[str, Any]) -> Finding:
    subject = f"kernel library {library['name'] or library['origin']}"
    if library["failure"]:
        return Finding(subject, f"not loaded: {library['failure']}", "bad")
    return Finding(subject, f"{library['version']}, {library['num_kernels']} kernels, {library['origin']}")


def _onednn() -> list[Finding]:
    from ..engine import onednn

    problem = onednn.preload()
    if problem is not None:
        return [Finding("oneDNN", problem, "bad")]
    return [Finding("oneDNN", str(onednn.find() or f"{onednn.LIBRARY}, found by the system's loader"))]


def _gpu() -> list[Finding]:
    """Driver, devices, and the libraries that the CUDA kernels use; without a usable device one line that says why."""
    from .. import engine
    from ..engine import cuda

    driver = cuda.find_driver()
    if driver.version == 0:
        return [Finding("gpu", "no driver: programs run on the CPU", "note")]
    module = cuda.kernel_module()
    findings = [Finding("gpu driver", f"CUDA {cuda.spoken(driver.version)}" + (f", kernel module {module}" if module else ""))]
    findings += [
        Finding(f"gpu {device.index}", f"{device.name}, compute capability {device.architecture / 10:.1f}, "
                f"{_gib(device.total_bytes)}")
        for device in driver.devices
    ]
    problem = cuda.unavailable()
    if problem is None:
        engine.load_backend("cuda")
        info = engine.device_info("cuda")
        versions = ", ".join(f"{name} {version}" for name, version in cuda.library_versions().items())
        findings.append(Finding("gpu memory", f"{_gib(info['free_bytes'])} of {_gib(info['total_bytes'])} unused"))
        findings.append(Finding("cuda", f"{info['versions']}; {versions}"))
        findings += _cudnn(cuda.without_cudnn())
    else:
        findings.append(Finding("cuda", f"{problem}; programs run on the CPU", "note"))
    return findings


def _cudnn(problem: str | None) -> list[Finding]:
    if problem is None:
        return []
    return [Finding("cuDNN", f"off: {problem}; attention runs on kernels of our own", "note")]


def _gpu_kernels() -> list[Finding]:
    """For each op the kernels that training would run on the device, the one of most calls first; all that there are where
    no installed family can be asked."""
    from .. import engine
    from ..engine import cuda

    if cuda.unavailable() is not None:
        return []
    from ..bench.kernels import chosen_kernels

    chosen = chosen_kernels("cuda")
    if not chosen:
        for kernel in engine.kernels():
            if kernel["backend"] == "cuda":
                chosen.setdefault(kernel["op"], []).append(kernel["name"])
    return [Finding(f"cuda kernels of {op}", ", ".join(names)) for op, names in chosen.items()]


def _memory() -> list[Finding]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, available = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    return [Finding("memory", f"{_gib(total)}, {_gib(available)} unused")]


def _disk(folder: Path) -> list[Finding]:
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    state: State = "note" if usage.free < _SMALL_DISK else "ok"
    return [Finding("disk", f"{_gib(usage.free)} free of {_gib(usage.total)} at {existing}", state)]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _plugins() -> list[Finding]:
    from ..plugins.manager import get_manager

    return [
        Finding(f"plugin {row.label}", f"{row.status}: {row.reason}" if row.reason else ", ".join(row.hooks), state)
        for row in get_manager().report()
        for state in ("ok" if row.status == "loaded" else "bad",)
    ]
