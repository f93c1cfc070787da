"""The core and the native code know no model family by name: what sets one apart is in its plugin."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

from surogate_core.plugins import get_manager

ROOT = Path(__file__).parents[2]
NATIVE = {".h", ".cuh", ".cpp", ".cu", ".txt"}
PROGRAMS = re.compile(r"llama\.cpp|llama-gguf-split")
# Files whose code has names of families, because a format or a package that others published has them.
ALLOWED = {
    # rope_type "llama3" of config.json: a formula, which other families have as well
    "surogate_core/dsl/rope.py": {"llama"},
    "surogate_core/families/hf_config.py": {"llama"},
    "surogate_core/families/rope_factors.py": {"llama"},
    # tokenizer.ggml.pre of GGUF files
    "surogate_core/weights/pretokenizers.py": {"llama", "qwen", "smollm"},
    # tokenizer.ggml.model of GGUF files, whose "llama" is SentencePiece
    "surogate_core/weights/tokenizer_build.py": {"llama", "gemma"},
    "surogate_core/weights/tokenizer_export.py": {"llama"},
    # the checkpoint that is fetched when none is named
    "surogate_core/weights/default_model.py": {"smollm"},
}


def stems() -> set[str]:
    """Names of the families of this repository without what counts their versions: gemma3_text is gemma."""
    families = get_manager().families
    ours = [name for name in families if families.source(name).startswith(("surogate-llama", "surogate-qwen", "surogate-gemma"))]
    return {re.match("[a-z]+", name)[0] for name in ours}


def python_code(text: str) -> str:
    """Without comments and without strings that stand alone, which document what is above them."""
    documented = {
        line for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(each.string for each in tokens if each.type != tokenize.COMMENT and each.start[0] not in documented)


def native_code(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def named(code: str) -> set[str]:
    words = PROGRAMS.sub("", code.lower())
    return {stem for stem in stems() if stem in words}


def test_code_names_no_family():
    found = {path: named(python_code(path.read_text(encoding="utf-8"))) for path in (ROOT / "surogate_core").rglob("*.py")}
    native = [path for path in (ROOT / "native").rglob("*") if path.suffix in NATIVE]
    assert len(found) > 100 and len(native) > 100
    found |= {path: named(native_code(path.read_text(encoding="utf-8"))) for path in native}
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == ALLOWED


def test_what_counts_as_a_name():
    assert stems() >= {"llama", "mistral", "smollm", "granite", "minicpm", "helium", "cwm", "qwen", "gemma"}
    said = 'def f(kind):\n    """Of Gemma."""\n    return kind == "x"  # not qwen\nN = 1\n"""Helium has it."""\n'
    assert not named(python_code(said)) and not named(native_code("int a; // gemma\n/* of\n qwen */ int b;"))
    assert named(python_code('if family.name == "qwen3":\n    is_gemma = f"{kind} of Helium"\n')) == {"qwen", "gemma", "helium"}
    assert named(native_code('bool is_granite = name == "llama.cpp"; // qwen')) == {"granite"}
