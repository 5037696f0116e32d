#!/usr/bin/env python3
"""Train a pico model, write it for transformers and llama.cpp, and measure what it recalls.

    scripts/train_pico.py pico-qwen3-s                 trains to the end, then writes models/pico/pico-qwen3-s/
    scripts/train_pico.py pico-qwen3-s --steps 500     500 steps more; the next call goes on there
    scripts/train_pico.py pico-qwen3-s --steps 0 --export    writes the model as it is now

A run that was stopped goes on where it was, with the same result. Needs `pip install -e '.[hf]'`, the build, and text
(scripts/fetch_text.sh). The curriculum so far is in WORK/MODEL/log.json.

Exit status: 0 when the training is done or the steps asked for are, 1 when something expected was not found.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ridgefill.errors import RidgefillError
from ridgefill.evaluation import texts
from ridgefill.machine import machine
from ridgefill.progress import progress, stderr

LENGTHS = (512, 1024)


def family_tokenizer(path: Path, docs):
    """The tokenizer of the family, made when there is none yet."""
    from ridgefill.pico import tokenizer

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.train(d.text for d in docs).save(str(path))
    return tokenizer.load(path)


def write_model(trainer, docs, out: Path, text: Path, n: int) -> None:
    """Files, agreement, recall and card of what `trainer` has, into `out`."""
    from ridgefill.pico import card, data, export, recall
    from ridgefill.pico.recipes import STAGES

    out.mkdir(parents=True, exist_ok=True)
    state, shape, tokenizer = trainer.model.state_dict(), trainer.recipe.shape, trainer.tokenizer
    path = out / f"{trainer.name}.f16.gguf"
    export.to_transformers(state, shape, tokenizer, out)
    export.to_gguf(state, shape, tokenizer, path, trainer.name)
    export.check_sizes(out)
    corpus = data.Corpus(tokenizer, texts.documents(text, "evaluation"), STAGES[-1].n_tokens)
    r = np.random.default_rng(trainer.seed)
    kl = export.agreement(out, path, [corpus.window(r, 512).tolist() for _ in range(8)])
    with progress(quiet=False) as report:
        records = recall.evaluate(path, tokenizer, corpus, n, LENGTHS, trainer.seed, report)
    found = recall.summary(records)
    (out / "recall.json").write_text(json.dumps({"machine": machine(), "recall": found, "items": records}, indent=1) + "\n")
    shutil.copy(trainer.folder / "log.json", out / "log.json")
    n_parameters = sum(t.numel() for t in state.values())
    cpu = machine()["cpu"] if trainer.device == "cpu" else trainer.device
    page = card.write(trainer.name, trainer.recipe, n_parameters, trainer.seed, trainer.at, docs, kl, found, cpu)
    (out / "README.md").write_text(page)
    for f in found:
        interval = f"{f['value']:.3f} [{f['low']:.3f}, {f['high']:.3f}]"
        stderr.print(f"{f['n_tokens']:,} tokens, {f['task']}: {interval} of {f['n']}", highlight=False)
    stderr.print(f"mean KL of the library to transformers {kl.mean_kl:.1e}; {out}", highlight=False)


def main(
    model: Annotated[str, typer.Argument(help="pico-llama, pico-qwen3-s or pico-qwen3-l")],
    out: Annotated[Path, typer.Option(help="folder of tokenizer.json and of a folder for each model")] = ROOT / "models" / "pico",
    work: Annotated[Path, typer.Option(help="states and logs of runs")] = ROOT / "out" / "pico",
    text: Annotated[Path, typer.Option(help="of scripts/fetch_text.sh")] = ROOT / "out" / "text",
    seed: Annotated[int, typer.Option()] = 0,
    steps: Annotated[int | None, typer.Option(help="train at most so many now [default: to the end]")] = None,
    export: Annotated[bool, typer.Option("--export", help="write the model although its training is not done")] = False,
    items: Annotated[int, typer.Option(help="prompts for each task and length of the recall")] = 200,
    threads: Annotated[int, typer.Option()] = 1,
    fast: Annotated[bool, typer.Option(help="compile the layers; needs a C++ compiler and changes the last bits")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget an earlier run")] = False,
) -> None:
    try:
        import torch
        from ridgefill.pico import data, train
        from ridgefill.pico.recipes import STAGES
    except ImportError as e:
        what = f"training needs torch, transformers and tokenizers, of which {e.name} is missing"
        raise RidgefillError(f"{what}: pip install -e '.[hf]'") from e
    torch.set_num_threads(threads)
    docs = texts.documents(text, "calibration")
    tokenizer = family_tokenizer(out / "tokenizer.json", docs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = train.Trainer(model, tokenizer, data.Corpus(tokenizer, docs, STAGES[-1].n_tokens), work / model, seed, device, fast)
    if (trainer.folder / "state.pt").exists() and not fresh:
        trainer.load()
    done = trainer.run(steps)
    if done or export:
        write_model(trainer, docs, out / model, text, items)


if __name__ == "__main__":
    try:
        typer.run(main)
    except RidgefillError as e:
        print(f"train_pico.py: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
