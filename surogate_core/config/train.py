"""The configuration of a training run: every key, its default and its meaning, once.

The keys are grouped in classes only so that a page of documentation has sections; a file has them all at its top level.
A default that depends on another key is a factory over the keys before it, so the order of the groups matters.
"""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .checks import find_problems
from .dataset import Datasets
from .fields import ByteSize, ConfigModel, CountOrFraction, Resume, Targets, Trackers


class ModelKeys(ConfigModel):
    """Model"""

    model: str | None = Field(
        None,
        description="A Hugging Face folder or a .gguf file, relative to the configuration's folder, then to the "
        "working directory; or the name of one that `surogate fetch-model` fetches, such as `default`. Quantised weights stay "
        "quantised while LoRA trains.",
    )
    family: str = Field("auto", description="The model family, by the name a plugin gives it; `auto` asks the weights.")
    from_scratch: bool = Field(
        False, description="Start from random weights: of `architecture`, or of the architecture that `model` has."
    )
    architecture: dict[str, Any] | None = Field(
        None,
        description="With `from_scratch`: the model's hyperparameters under the names of a Hugging Face config.json, "
        "`model_type` or `architectures` among them.",
    )
    tokenizer: str | None = Field(
        None, description="A folder or .gguf file with the tokenizer; empty: the model's own. Relative like `model`."
    )
    chat_template: str | None = Field(
        None, description="A Jinja chat template, its file, or the name of a known one; empty: the tokenizer's own."
    )


class DataKeys(ConfigModel):
    """Data"""

    datasets: Datasets = Field(min_length=1, description="What to train on: a list, one data set, or only its path.")
    validation_datasets: Datasets = Field(
        default_factory=list, description="What to evaluate on, each with a loss of its own."
    )
    validation_split: CountOrFraction = Field(
        0, description="Rows of `datasets` to keep for evaluation instead: a fraction below 1, or a count; 0: none."
    )
    sequence_len: int = Field(1024, ge=2, description="Tokens in a sequence; with packing, in a pack of documents.")
    overlong: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="What becomes of a row longer than `sequence_len`; always counted. `surogate pt` has `split`.",
    )
    sample_packing: bool = Field(
        True, description="Put several documents into one sequence; none of them sees another."
    )
    train_on: Literal["assistant", "last", "all", "completion"] = Field(
        "assistant",
        description="Which tokens carry loss: every assistant turn; what follows the last user turn; everything; "
        "the completion. Plain text always trains whole.",
    )
    train_on_empty_think: bool = Field(
        False, description="Let think blocks without a thought, which the template itself writes, carry loss."
    )
    system_prompt: str | None = Field(None, description="System message of conversations that have none.")
    bad_rows: Literal["error", "quarantine"] = Field(
        "error", description="What becomes of a row that cannot be read: stop, or set it aside in a file and count it."
    )


class BatchKeys(ConfigModel):
    """Length of the run and batch"""

    num_epochs: int = Field(3, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(
        None, ge=1, description="Optimizer steps after which to stop; wins over `num_epochs`. Empty: no limit."
    )
    per_device_train_batch_size: int = Field(2, ge=1, description="Sequences in one micro-batch on one device.")
    global_batch_size: int | None = Field(
        None, ge=1, description="Sequences in one optimizer step; gives `gradient_accumulation_steps` where it is set."
    )
    gradient_accumulation_steps: int = Field(
        default_factory=lambda keys: _derived_accumulation(keys),
        ge=1,
        description="Micro-batches in one optimizer step. Default: 4, or what `global_batch_size` asks for.",
    )


def _derived_accumulation(keys: dict[str, Any]) -> int:
    # Rounds down where it does not divide: the check of the whole configuration then says so.
    total, micro = keys["global_batch_size"], keys["per_device_train_batch_size"]
    return 4 if total is None else max(1, total // micro)


class LoraKeys(ConfigModel):
    """LoRA"""

    lora: bool = Field(
        default_factory=lambda keys: not keys["from_scratch"],
        description="Train low-rank adapters and leave the weights as they are; false: train all weights. "
        "Default: true, but false with `from_scratch`.",
    )
    lora_rank: int = Field(16, ge=1, description="Rank of the adapters.")
    lora_alpha: float = Field(32.0, gt=0, description="The adapters' output is scaled by lora_alpha / lora_rank.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Share of an adapter's inputs that dropout zeroes.")
    lora_target_modules: Targets = Field(
        default_factory=lambda: ["all"],
        description="Which linear layers get an adapter: roles (`attn.q`), Hugging Face names (`q_proj`), or `all`.",
    )
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(lora_rank) instead.")


class OptimizerKeys(ConfigModel):
    """Optimizer and schedule"""

    optimizer: str = Field("adamw", description="The optimizer, by its registered name.")
    learning_rate: float = Field(
        default_factory=lambda keys: 2e-4 if keys["lora"] or keys["from_scratch"] else 2e-5,
        gt=0,
        description="Peak learning rate. Default: 2e-4 for LoRA and from scratch, 2e-5 for all weights of a model.",
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "linear", description="Course of the learning rate after the warm-up; `wsd`: constant, then a decay at the end."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises, in every schedule.")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="The same as a fraction of all steps.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Learning rate at the end, as a fraction of the peak.")
    wsd_decay_ratio: float = Field(0.1, gt=0, le=1, description="With `wsd`: fraction of all steps that decay.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are scaled down to this global norm; 0: never.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    optimizer_state_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="What the optimizer keeps of every weight; `bf16` is rounded stochastically."
    )
    master_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="What trained matrices are kept and updated in; `bf16`, for recipes that compute in it, is rounded "
        "stochastically and needs no copy to compute with. Vectors stay in fp32.",
    )


class EngineKeys(ConfigModel):
    """Precision and machine"""

    recipe: str = Field("bf16", description="The precision recipe, by its registered name: `bf16`, `pure_bf16`, `fp32`.")
    backend: str = Field(
        "auto",
        description="The backend that runs the program, by its registered name: `cpu`, `cuda`; `auto`: the first but "
        "`cpu` that this machine can use, else `cpu`.",
    )
    device: int = Field(0, ge=0, description="Which of the backend's devices.")
    cuda_graphs: bool = Field(
        True, description="Launch captured CUDA graphs; false: the same kernels one by one, with the same bits."
    )
    deterministic: bool = Field(
        True,
        description="false: attention's backward may add in any order, which is faster with many documents and differs "
        "in rounding from run to run.",
    )
    strategy: str = Field("single", description="The parallelism strategy, by its registered name: `single`.")
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Threads of the CPU backend; `auto`: one for each core the process may use."
    )
    memory_budget: ByteSize = Field(
        "auto",
        description="Memory the run may take, in bytes or as `1.2GiB`; what is recomputed follows from it. "
        "`auto`: what the machine has free.",
    )
    plugins: list[str] | None = Field(
        None, description="The only plugins to use, by distribution; each must load. Empty: every installed one."
    )


class RunKeys(ConfigModel):
    """Run"""

    output_dir: str = Field(
        "output",
        min_length=1,
        description="Folder of checkpoints, metrics and result; relative to the working directory.",
    )
    run_name: str = Field(
        default_factory=lambda keys: PurePath(keys["output_dir"]).name or "run",
        description="Label of the run. Default: the last part of `output_dir`.",
    )
    seed: int = Field(1234, ge=0, lt=2**63, description="Seed of the data order, of dropout and of new weights.")
    resume_from_checkpoint: Resume = Field(
        "auto",
        description="`auto`: go on from the newest checkpoint in `output_dir`, where there is one; a checkpoint's "
        "folder; or false: start anew.",
    )
    eval_steps: CountOrFraction = Field(
        default_factory=lambda keys: 100 if keys["validation_datasets"] or keys["validation_split"] else 0,
        description="Steps between evaluations; below 1: a fraction of all steps; 0: only at the end. "
        "Default: 100 with validation data, else 0.",
    )
    save_steps: CountOrFraction = Field(
        50, description="Steps between checkpoints; below 1: a fraction of all steps; 0: only at the end."
    )
    save_total_limit: int | None = Field(5, ge=1, description="Checkpoints to keep, the newest; empty: all.")
    logging_steps: int = Field(1, ge=1, description="Steps between progress lines. Metrics are written at every step.")
    report_to: Trackers = Field(
        default_factory=list, description="Trackers that get the metrics too, by their registered names."
    )


# In the order of the page.
SECTIONS: tuple[type[ConfigModel], ...] = (
    ModelKeys, DataKeys, BatchKeys, LoraKeys, OptimizerKeys, EngineKeys, RunKeys,
)  # fmt: skip


# Fields are collected from the last base to the first: this is the order of SECTIONS.
class TrainConfig(RunKeys, EngineKeys, OptimizerKeys, LoraKeys, BatchKeys, DataKeys, ModelKeys):
    """Everything a run is made of, for `surogate sft` and `surogate pt` alike. Made by `resolve`, or in Python."""

    @model_validator(mode="after")
    def _check_together(self) -> TrainConfig:
        problems = find_problems(self)
        if problems:
            text = "; ".join(problem.message for problem in problems)
            raise PydanticCustomError("together", "{text}", {"text": text, "problems": problems})
        return self

    @property
    def effective_batch_size(self) -> int:
        """Sequences in one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.validation_datasets) or self.validation_split > 0

    def warmup(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * total_steps)

    def eval_interval(self, total_steps: int) -> int:
        """Steps between evaluations of a run of `total_steps`; 0: only at the end."""
        return _interval(self.eval_steps, total_steps)

    def save_interval(self, total_steps: int) -> int:
        """Steps between checkpoints of a run of `total_steps`; 0: only at the end."""
        return _interval(self.save_steps, total_steps)


def _interval(value: int | float, total_steps: int) -> int:
    return value if isinstance(value, int) else max(1, math.ceil(value * total_steps)) if value else 0
