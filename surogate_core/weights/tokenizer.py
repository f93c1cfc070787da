"""The tokenizer of a model, from its Hugging Face folder or from a GGUF's metadata, and back to either."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from ..errors import WeightError
from ..files import write_text
from .files import read_json, write_json
from .gguf_file import GGUFFile, typed
from .pretokenizers import PRE_TOKENIZERS
from .tokenizer_build import BYTE_TOKENS, PREFIX, SPACE, build_from_gguf, token_id
from .tokenizer_export import gguf_metadata_of

_NAMES = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class _Facts:
    """What a tokenizer's files say beside the vocabulary. Ids are None where there is no such token."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    eot: int | None = None
    stop: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()  # what add_special_tokens puts before and after a text
    suffix: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)
    hf_config: dict[str, Any] | None = None  # tokenizer_config.json as it was read
    gguf: dict[str, Any] | None = None  # tokenizer.* as it was read, with the types it was written with


class Tokenizer:
    """Text to token ids and back.

    ``bos_token_id``, ``eos_token_id``, ``pad_token_id``, ``unk_token_id``, ``eot_token_id`` (None where there is none) and
    the texts ``bos_token`` ...; ``stop_token_ids``: all ids that end an answer; ``chat_template``: Jinja text or None;
    ``chat_templates``: all of them by name; ``vocab_size``: ids are below it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: _Facts, where: str) -> None:
        self.where = where
        self._facts = facts
        self._backend = backend
        self._post_processor = backend.post_processor
        # The tokens around a text are added here, and a post-processor would trim spaces off the offsets.
        backend.post_processor = None
        backend.no_padding()
        backend.no_truncation()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id, self.eos_token_id, self.unk_token_id = facts.bos, facts.eos, facts.unk
        self.pad_token_id, self.eot_token_id = facts.pad, facts.eot
        self.bos_token, self.eos_token = self._text(facts.bos), self._text(facts.eos)
        self.pad_token, self.unk_token = self._text(facts.pad), self._text(facts.unk)
        ends = [facts.eos, facts.eot, *facts.stop]
        self.stop_token_ids = tuple(dict.fromkeys(number for number in ends if number is not None))
        self.chat_templates = dict(facts.chat_templates)
        self.chat_template = self.chat_templates.get("default")

    # -- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, gguf: GGUFFile | str | Path) -> Tokenizer:
        """From a GGUF's metadata; raises WeightError for a kind or a pre-tokenizer that is not known."""
        file = gguf if isinstance(gguf, GGUFFile) else GGUFFile(gguf)
        where, metadata = str(file.path), file.metadata
        backend = build_from_gguf(metadata, where)
        ids = {name: token_id(metadata, name, where) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
        is_bpe = metadata[PREFIX + "model"] == "gpt2"
        bos_default = PRE_TOKENIZERS[metadata.get(PREFIX + "pre", "default")].add_bos if is_bpe else True
        add_bos = metadata.get(PREFIX + "add_bos_token", bos_default) and ids["bos"] is not None
        add_eos = metadata.get(PREFIX + "add_eos_token", False) and ids["eos"] is not None
        templates = {
            "default" if key == "tokenizer.chat_template" else key.removeprefix("tokenizer.chat_template."): value
            for key, value in metadata.items()
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        facts = _Facts(
            ids["bos"], ids["eos"], ids["unknown"], ids["padding"], ids["eot"],
            stop=(ids["eom"],) if ids["eom"] is not None else (),
            prefix=(ids["bos"],) if add_bos else (),
            suffix=(ids["eos"],) if add_eos else (),
            chat_templates=templates,
            gguf={k: typed(v, file.types[k]) for k, v in metadata.items() if k.startswith("tokenizer.")},
        )  # fmt: skip
        tokenizer = cls(backend, facts, where)
        tokenizer._post_processor = tokenizer._surrounding()
        return tokenizer

    @classmethod
    def from_hf_folder(cls, folder: str | Path) -> Tokenizer:
        """From a folder with tokenizer.json; raises WeightError when it has none or it cannot be read."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            found = (
                "only tokenizer.model, which has to be converted" if (folder / "tokenizer.model").exists() else "none"
            )
            raise WeightError(f"{folder} has no tokenizer.json ({found}); save it once with a fast tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise WeightError(f"{path} is not a tokenizer: {error}; copy or download the file again") from error
        optional = [
            folder / name for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
        ]
        config, special, generation = (read_json(each) if each.exists() else {} for each in optional)
        ids = {name: _hf_token_id(backend, name, config, special, folder) for name in _NAMES}
        bare = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full)) if bare and full[i : i + len(bare)] == bare), len(full))
        stop = generation.get("eos_token_id")
        facts = _Facts(
            **ids,
            stop=tuple(stop if isinstance(stop, list) else [] if stop is None else [stop]),
            prefix=tuple(full[:start]),
            suffix=tuple(full[start + len(bare) :]),
            chat_templates=_hf_chat_templates(folder, config),
            hf_config=config,
        )
        return cls(backend, facts, str(folder))

    def use_chat_template(self, template: str, end: str | None = None) -> None:
        """The default template from here on, and of what is saved. ``end``: a token that ends turns, and so answers."""
        self.chat_template = self.chat_templates["default"] = template
        number = None if end is None else self._backend.token_to_id(end)
        if number is not None and number not in self.stop_token_ids:
            earlier = () if self._facts.eot is None else (self._facts.eot,)
            self._facts = replace(self._facts, eot=number, stop=(*self._facts.stop, *earlier))
            self.eot_token_id = number
            self.stop_token_ids = (*self.stop_token_ids, number)

    # -- using -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of a text. ``add_special_tokens``: with what the model expects around a text (a BOS). Without
        ``parse_special``, text that spells a special token is text: for what users write."""
        ids = self._encoder(parse_special).encode(text, add_special_tokens=False).ids
        return [*self._facts.prefix, *ids, *self._facts.suffix] if add_special_tokens else ids

    def encode_with_offsets(self, text: str, parse_special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, for each, the characters ``[start, end)`` of the text that it stands for, spaces included. The
        tokens of one character that is several bytes all have that character's offsets."""
        encoding = self._encoder(parse_special).encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def plain_encoder(self, also: frozenset[str] = frozenset()) -> Callable[[str], list[int]]:
        """Encodes text in which special tokens, and the added tokens ``also``, are text like any other.

        It goes through the tokenizer's parts one by one: a copy that matches fewer tokens takes seconds to make where the
        vocabulary is large.
        """
        words = sorted(set(self.added_tokens) - self.special_tokens - also, key=len, reverse=True)
        added = re.compile("|".join(map(re.escape, words))) if words else None
        normalizer, cutter, model = self._backend.normalizer, self._backend.pre_tokenizer, self._backend.model

        def encode_part(text: str) -> list[int]:
            text = normalizer.normalize_str(text) if normalizer is not None else text
            pieces = [piece for piece, _ in cutter.pre_tokenize_str(text)] if cutter is not None else [text]
            return [token.id for piece in pieces if piece for token in model.tokenize(piece)]

        def encode(text: str) -> list[int]:
            ids, place = [], 0
            for found in added.finditer(text) if added is not None else ():
                ids += [*encode_part(text[place : found.start()]), self.added_tokens[found.group()]]
                place = found.end()
            return ids + encode_part(text[place:])

        return encode

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text (for a special token its spelling); b"" for an id without a token."""
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in text)
        if text in _BYTE_TOKEN_VALUES:
            return bytes([_BYTE_TOKEN_VALUES[text]])
        return text.replace(SPACE, " ").encode()

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled so, or None."""
        return self._backend.token_to_id(text)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids, by their spelling, of the tokens that are matched in a text before it is cut: special ones and others."""
        return {token.content: number for number, token in self._added.items()}

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Spellings of the added tokens that ``parse_special`` is about."""
        return frozenset(token.content for token in self._added.values() if token.special)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_hf(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja, so that
        `transformers` loads this tokenizer."""
        folder = Path(folder)
        spec = self._spec()
        write_text(folder / "tokenizer.json", json.dumps(spec, ensure_ascii=False, indent=2), WeightError)
        named = {f"{name}_token": self._text(getattr(self._facts, name)) for name in _NAMES}
        special = {key: text for key, text in named.items() if text is not None}
        if self._facts.hf_config is None:
            config: dict[str, Any] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "add_bos_token": bool(self._facts.prefix),
                "add_eos_token": bool(self._facts.suffix),
                "added_tokens_decoder": {
                    str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                    for token in spec["added_tokens"]
                },
                **special,
            }
        else:
            config = {key: value for key, value in self._facts.hf_config.items() if key != "chat_template"}
        write_json(folder / "tokenizer_config.json", config)
        write_json(folder / "special_tokens_map.json", special)
        for name, template in self.chat_templates.items():
            file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            write_text(folder / file, template, WeightError)

    def gguf_metadata(self, vocab_size: int | None = None) -> dict[str, Any]:
        """The ``tokenizer.*`` metadata of a GGUF; with ``vocab_size``, padded by named unused tokens to the embedding's
        rows. Raises WeightError when GGUF has no name for how this tokenizer cuts text."""
        return gguf_metadata_of(self, self._spec(), self._facts, vocab_size)

    def _spec(self) -> dict[str, Any]:
        """The tokenizer as the object of a tokenizer.json."""
        spec = json.loads(self._backend.to_str())
        if self._post_processor is not None:
            spec["post_processor"] = json.loads(self._post_processor.__getstate__())
        return spec

    def _surrounding(self) -> processors.PostProcessor | None:
        """The post-processor that adds the tokens around a text."""
        before, after = ([self._text(number) for number in part] for part in (self._facts.prefix, self._facts.suffix))
        if not before and not after:
            return None
        special = dict(zip([*before, *after], [*self._facts.prefix, *self._facts.suffix], strict=True))
        single = [*before, "$A", *after]
        pair = [*single, *(f"{piece}:1" for piece in [*before, "$B", *after])]
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(special.items()))

    def _text(self, token: int | None) -> str | None:
        return None if token is None else self._backend.id_to_token(token)

    def _encoder(self, parse_special: bool) -> tokenizers.Tokenizer:
        return self._backend if parse_special else self._literal_backend

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A second tokenizer to which special tokens are text; the switch is a state of the object, so it has its own."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self._backend.decoder)


def _hf_token_id(
    backend: tokenizers.Tokenizer, name: str, config: dict[str, Any], special: dict[str, Any], folder: Path
) -> int | None:
    value = config.get(f"{name}_token", special.get(f"{name}_token"))
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    number = backend.token_to_id(text) if isinstance(text, str) else None
    if number is None:
        raise WeightError(
            f"{folder}: {name}_token is {text!r}, which tokenizer.json does not know; the files do not match"
        )
    return number


def saved_chat_template(folder: str | Path) -> str | None:
    """The default chat template beside the tokenizer in a Hugging Face folder, or None."""
    config = Path(folder) / "tokenizer_config.json"
    return _hf_chat_templates(Path(folder), read_json(config) if config.exists() else {}).get("default")


def _hf_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """All chat templates by name; a file beside the configuration wins over its ``chat_template`` key."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {entry["name"]: entry["template"] for entry in value}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return {**templates, **{name: path.read_text(encoding="utf-8") for name, path in files.items()}}


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte: itself where it is printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {**{chr(value): value for value in printable}, **{chr(256 + i): value for i, value in enumerate(others)}}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN_VALUES = {token: value for value, token in enumerate(BYTE_TOKENS)}
