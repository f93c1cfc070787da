"""What runs the program: which backend, and what it has to give."""

from __future__ import annotations

from typing import Any

from .. import engine
from ..config import TrainConfig
from ..engine import cuda
from ..errors import ConfigError, EngineError
from ..plugins.manager import PluginManager


def choose_backend(config: TrainConfig, manager: PluginManager) -> tuple[TrainConfig, str]:
    """The config with ``backend: auto`` decided: the first but "cpu" that this machine can use, else "cpu"; and why ("" where
    the config names one). ConfigError where that backend, or its ``device``, cannot be used."""
    name, why = config.backend, ""
    if name == "auto":
        reasons = {each: manager.backends[each].unavailable() for each in manager.backends if each != "cpu"}
        name = next((each for each, reason in reasons.items() if reason is None), "cpu")
        why = "; ".join(f"{each} cannot be used: {reason}" for each, reason in reasons.items() if reason is not None)
    reason = manager.backends[name].unavailable()
    if reason:
        raise ConfigError(
            f"backend {name!r} cannot be used here: {reason}", "Or set backend: auto, which takes what this machine has."
        )
    if name == "cpu" and config.device:
        raise ConfigError(f"device is {config.device}, and the run is on the cpu, which is one device" + (why and f" ({why})"),
                          "Leave device out, or set backend.")
    if name != "cpu":
        device_info(name, config.device)
    return config.model_copy(update={"backend": name}), why


def device_info(backend: str, device: int) -> dict[str, Any]:
    """`engine.device_info`; ConfigError where the device is not there, does not answer, or is too old."""
    hint = "Set device to another, or see what `surogate doctor` says."
    try:
        info = engine.device_info(backend, device)
    except EngineError as error:
        raise ConfigError(f"device {device} of backend {backend!r} cannot be used: {error}", hint) from error
    if backend == "cuda" and info["architecture"] < cuda.NEEDED_ARCHITECTURE:
        raise ConfigError(f"device {device}, {info['name']}, has compute capability {info['architecture'] / 10:.1f}; the "
                          f"kernels need {cuda.NEEDED_ARCHITECTURE / 10:.1f} or later", hint)
    return info


def describe_machine(config: TrainConfig, threads: int, why: str) -> str:
    """One line, for a config whose backend was chosen: backend, device, and ``why`` it is that one."""
    if config.backend == "cpu":
        text = f"cpu, {threads} threads"
    else:
        info = device_info(config.backend, config.device)
        text = f"{config.backend} device {config.device}, {info['name']}; {info['versions']}"
        text += "" if config.cuda_graphs else "; kernels launched one by one"
    return text + (f"; {why}" if why else "")
