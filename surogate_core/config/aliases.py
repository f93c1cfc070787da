"""Spellings of other tools that are understood, and what each means here. Tables only; `vocabulary` applies them.

Nothing is guessed: a spelling that means something else elsewhere is converted, and one that cannot be is refused with
the reason.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """What a foreign value says: `key` is `value` (YAML text).

    `weak`: the foreign tool's default, which says nothing where another key speaks. `remark`: added to the note.
    """

    key: str
    value: str
    weak: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a value cannot be taken, and what to do instead."""

    message: str
    hint: str


# A value that asks for nothing: it is read, and changes nothing.
NOTHING = None

# Another name for the same thing.
RENAMED: dict[str, str] = {
    "model_name_or_path": "model",
    "base_model": "model",
    "model_name": "model",
    "model_config": "architecture",
    "out_dir": "output_dir",
    "project_name": "run_name",
    "dataset": "datasets",
    "dataset_name": "datasets",
    "train_data": "datasets",
    "system": "system_prompt",
    "default_system": "system_prompt",
    "new_system_prompt": "system_prompt",
    "test_datasets": "validation_datasets",
    "val_dataset": "validation_datasets",
    "eval_dataset": "validation_datasets",
    "val_set_size": "validation_split",
    "val_size": "validation_split",
    "split_dataset_ratio": "validation_split",
    "validation_split_ratio": "validation_split",
    "max_length": "sequence_len",
    "max_seq_length": "sequence_len",
    "cutoff_len": "sequence_len",
    "seq_len": "sequence_len",
    "block_size": "sequence_len",
    "packed_sequence_size": "sequence_len",
    "packed": "sample_packing",
    "num_train_epochs": "num_epochs",
    "epochs": "num_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "local_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "lr_decay_style": "lr_scheduler_type",
    "num_warmup_steps": "warmup_steps",
    "cosine_min_lr_ratio": "min_lr_ratio",
    "final_lr_fraction": "min_lr_ratio",
    "wsd_decay_steps_fraction": "wsd_decay_ratio",
    "clip_grad_norm": "max_grad_norm",
    "adamw_beta1": "adam_beta1",
    "adamw_beta2": "adam_beta2",
    "adamw_epsilon": "adam_epsilon",
    "optim": "optimizer",
    "main_params_dtype": "master_dtype",
    "exp_avg_dtype": "optimizer_state_dtype",
    "exp_avg_sq_dtype": "optimizer_state_dtype",
    "lora_r": "lora_rank",
    "r": "lora_rank",
    "target_modules": "lora_target_modules",
    "lora_target": "lora_target_modules",
    "val_every": "eval_steps",
    "keep_last_n": "save_total_limit",
    "train_seed": "seed",
    "use_cuda_graphs": "cuda_graphs",
    "deterministic_mode": "deterministic",
}

# Groups of other tools: group -> their key -> ours.
NESTED: dict[str, dict[str, str]] = {
    "optimizer": {
        "name": "optimizer",
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "eps": "adam_epsilon",
    },
    "peft": {
        "dim": "lora_rank",
        "r": "lora_rank",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "target_modules": "lora_target_modules",
    },
}

_QUANTISED = Refusal(
    "quantising the base while it is loaded is not supported",
    "Give a .gguf file with quantised weights as `model`; it stays quantised while LoRA trains.",
)

_HALF = Refusal("there is no fp16 recipe: it overflows without loss scaling", "Use `recipe: bf16` or `fp32`.")

# Words and switches of other tools: key -> written value -> meaning. "true" and "false" match every spelling of them.
CONVERTED: dict[str, dict[str, Meaning | Refusal | None]] = {
    "packing": {
        "true": Meaning("sample_packing", "true", remark="documents are isolated from each other"),
        "false": Meaning("sample_packing", "false"),
    },
    "neat_packing": {"true": Meaning("sample_packing", "true"), "false": NOTHING},
    "excess_length_strategy": {
        "drop": Meaning("overlong", "drop"),
        "truncate": Meaning("overlong", "truncate"),
        "raise": Meaning("overlong", "error"),
    },
    "truncation_strategy": {
        "delete": Meaning("overlong", "drop"),
        "right": Meaning("overlong", "truncate"),
        "split": Meaning("overlong", "split"),
        "raise": Meaning("overlong", "error"),
        "left": Refusal("cutting a row's beginning is not supported", "Set `overlong` to drop, truncate or split."),
    },
    "drop_long_samples": {"true": Meaning("overlong", "drop"), "false": NOTHING},
    "train_on_inputs": {"true": Meaning("train_on", "all"), "false": Meaning("train_on", "assistant")},
    "train_on_prompt": {"true": Meaning("train_on", "all"), "false": Meaning("train_on", "assistant", weak=True)},
    "assistant_only_loss": {"true": Meaning("train_on", "assistant"), "false": Meaning("train_on", "all", weak=True)},
    "completion_only_loss": {"true": Meaning("train_on", "completion"), "false": Meaning("train_on", "all", weak=True)},
    "train_on_completions": {"true": Meaning("train_on", "assistant"), "false": Meaning("train_on", "all")},
    "mask_history": {"true": Meaning("train_on", "last"), "false": NOTHING},
    "roles_to_train": {"assistant": Meaning("train_on", "assistant")},
    "loss_scale": {
        "default": Meaning("train_on", "assistant"),
        "last_round": Meaning("train_on", "last"),
        "all": Meaning("train_on", "all"),
    },
    "adapter": {
        "lora": Meaning("lora", "true"),
        "none": Meaning("lora", "false"),
        "qlora": _QUANTISED,
    },
    "finetuning_type": {"lora": Meaning("lora", "true"), "full": Meaning("lora", "false")},
    "tuner_type": {"lora": Meaning("lora", "true"), "full": Meaning("lora", "false")},
    "lora_target_linear": {"true": Meaning("lora_target_modules", "all"), "false": NOTHING},
    "bf16": {
        "true": Meaning("recipe", "bf16"),
        "auto": Meaning("recipe", "bf16"),
        "false": Meaning("recipe", "fp32", weak=True),
    },
    "pure_bf16": {
        "true": Meaning("recipe", "pure_bf16", remark="masters and optimizer states keep their own dtypes"),
        "false": NOTHING,
    },
    "precision": {
        "bf16-true": Meaning("recipe", "pure_bf16", remark="masters and optimizer states keep their own dtypes"),
        "bf16-mixed": Meaning("recipe", "bf16"),
        "32-true": Meaning("recipe", "fp32"),
        "16-true": _HALF,
        "16-mixed": _HALF,
    },
    "disable_cuda_graphs": {"true": Meaning("cuda_graphs", "false"), "false": Meaning("cuda_graphs", "true", weak=True)},
    "full_determinism": {"true": Meaning("deterministic", "true"), "false": NOTHING},
    "fp16": {
        "true": _HALF,
        "false": NOTHING,
    },
    "load_in_4bit": {"true": _QUANTISED, "false": NOTHING},
    "load_in_8bit": {"true": _QUANTISED, "false": NOTHING},
    "qlora_bnb": {"true": _QUANTISED, "false": NOTHING},
    "qlora_fp8": {"true": _QUANTISED, "false": NOTHING},
    "qlora_fp4": {"true": _QUANTISED, "false": NOTHING},
    "use_wandb": {"true": Meaning("report_to", "wandb"), "false": NOTHING},
    "auto_resume_from_checkpoints": {
        "true": Meaning("resume_from_checkpoint", "auto"),
        "false": Meaning("resume_from_checkpoint", "false", weak=True),
    },
    "merge_adapter": {
        "true": Refusal("merging is a command of its own", "Leave the key out and run `surogate merge` after the run."),
        "false": NOTHING,
    },
    "gpus": {"1": NOTHING},
    "lora_dtype": {"fp32": NOTHING},
    "gradient_dtype": {"none": NOTHING, "fp32": NOTHING},
    "bf16_optimizer_states": {"true": Meaning("optimizer_state_dtype", "bf16"), "false": NOTHING},
    "cooldown_steps": {"0": NOTHING},
}

# Our keys, values of other tools: key -> written value -> ours ("" for an empty value).
RESPELLED: dict[str, dict[str, str]] = {
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"},
    "lr_scheduler_type": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "warmup_stable_decay": "wsd",
    },
    "max_steps": {"-1": "", "0": ""},
    "recipe": {"bfloat16": "bf16", "float32": "fp32"},
    "master_dtype": {"bfloat16": "bf16", "float32": "fp32"},
    "optimizer_state_dtype": {"bfloat16": "bf16", "float32": "fp32"},
}

# Settings that exist elsewhere and are decided by something else here: key -> what decides.
DECIDED: dict[str, str] = {
    "recompute": "what is recomputed follows from `memory_budget`",
    "gradient_checkpointing": "what is recomputed follows from `memory_budget`",
    "lmhead_chunks": "the loss is always computed in chunks",
    "auto_lmhead_chunks": "the loss is always computed in chunks",
    "flash_attention": "attention never holds a whole score matrix",
    "dataloader_num_workers": "data is prepared without worker processes",
}

# Keys that are known and cannot be read one way only.
REFUSED: dict[str, Refusal] = {
    "batch_size": Refusal(
        "`batch_size` means one micro-batch in some tools and the whole step in others",
        "Write `per_device_train_batch_size` (sequences in a micro-batch) or `global_batch_size` (in a step).",
    ),
    "quantization_bit": _QUANTISED,
}

# The same for an entry of `datasets`.
DATASET_RENAMED: dict[str, str] = {
    "name": "subset",
    "num_samples": "samples",
    "max_samples": "samples",
    "column_mapping": "columns",
    "format": "type",
}
# <name>_field and field_<name> say which column of the file holds <name>.
DATASET_COLUMNS: tuple[str, ...] = (
    "text", "messages", "tools", "system", "instruction", "input", "output", "prompt", "completion",
)  # fmt: skip
