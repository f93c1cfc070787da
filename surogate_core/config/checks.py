"""What single keys cannot tell: keys that contradict each other, or need one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .train import TrainConfig


@dataclass(frozen=True)
class Problem:
    """`message`: what does not go together and what to do. `keys`: the keys at fault."""

    message: str
    keys: tuple[str, ...]


def find_problems(config: TrainConfig) -> list[Problem]:
    """All contradictions in a configuration whose keys are valid one by one."""
    checks = (_model, _validation, _batch, _schedule, _lora)
    return [problem for check in checks for problem in check(config)]


def _model(config: TrainConfig) -> Iterator[Problem]:
    if not config.from_scratch:
        if config.model is None:
            yield Problem("`model` is missing: give a Hugging Face folder or a .gguf file", ("model",))
        if config.architecture is not None:
            yield Problem("`architecture` is only for `from_scratch: true`", ("architecture", "from_scratch"))
        return
    if config.model is None and config.architecture is None:
        yield Problem("`from_scratch` needs `architecture`, or a `model` to take it from", ("from_scratch",))
    if config.model is not None and config.architecture is not None:
        yield Problem("`model` and `architecture` both say what to build: keep one", ("model", "architecture"))
    if config.architecture is not None and config.tokenizer is None:
        yield Problem("`architecture` brings no tokenizer: set `tokenizer`", ("architecture", "tokenizer"))


def _validation(config: TrainConfig) -> Iterator[Problem]:
    if config.validation_datasets and config.validation_split:
        yield Problem(
            "`validation_datasets` and `validation_split` are both set: keep one",
            ("validation_datasets", "validation_split"),
        )
    if config.eval_steps and not config.has_validation:
        yield Problem(
            "`eval_steps` is set, but there is nothing to evaluate on: set `validation_datasets` or `validation_split`",
            ("eval_steps",),
        )


def _batch(config: TrainConfig) -> Iterator[Problem]:
    total, micro = config.global_batch_size, config.per_device_train_batch_size
    accumulation = config.gradient_accumulation_steps
    if total is None or total == micro * accumulation:
        return
    if total % micro:
        yield Problem(
            f"`global_batch_size` {total} is no multiple of `per_device_train_batch_size` {micro}",
            ("global_batch_size", "per_device_train_batch_size"),
        )
        return
    yield Problem(
        f"`per_device_train_batch_size` {micro} x `gradient_accumulation_steps` {accumulation} = "
        f"{micro * accumulation}, but `global_batch_size` is {total}: leave one of them out",
        ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    )


def _schedule(config: TrainConfig) -> Iterator[Problem]:
    if config.warmup_steps and config.warmup_ratio:
        yield Problem("`warmup_steps` and `warmup_ratio` are both set: keep one", ("warmup_steps", "warmup_ratio"))
    if config.max_steps is not None and config.warmup_steps > config.max_steps:
        yield Problem(
            f"`warmup_steps` {config.warmup_steps} is more than `max_steps` {config.max_steps}",
            ("warmup_steps", "max_steps"),
        )
    if config.lr_scheduler_type == "wsd" and config.warmup_ratio + config.wsd_decay_ratio > 1:
        yield Problem(
            "`warmup_ratio` and `wsd_decay_ratio` together are more than the whole run",
            ("warmup_ratio", "wsd_decay_ratio"),
        )


def _lora(config: TrainConfig) -> Iterator[Problem]:
    if config.lora and config.from_scratch:
        yield Problem(
            "`lora` trains adapters on trained weights, but `from_scratch` has none: set one of them to false",
            ("lora", "from_scratch"),
        )
    if "all" in config.lora_target_modules and len(config.lora_target_modules) > 1:
        yield Problem("`lora_target_modules` has `all` and others: keep `all`, or the others", ("lora_target_modules",))
