"""The card of a model: what it is, what it was made from and how, and what it recalls."""

from __future__ import annotations

from collections.abc import Sequence

from ..text import Document
from .export import Agreement
from .recipes import N_CTX, Recipe
from .train import Progress

_LAYOUT = """# {name}

A language model of {n_parameters:,} parameters that looks facts up in its context, made to measure what fills cost. It is of no
other use: it has read {n_documents} documents.

| architecture | layers | width | feed-forward | heads | KV heads | head size | vocabulary | context | norm on Q and K |
|---|---|---|---|---|---|---|---|---|---|
| {arch} | {s.n_layer} | {s.width} | {s.ff} | {s.n_head} | {s.n_head_kv} | {s.head} | {s.n_vocab:,} | {n_ctx:,} | {norm} |

`model.safetensors` and `{name}.f16.gguf` hold the same f16 weights. The mean KL between transformers in float32 and the library is
{kl.mean_kl:.1e} nats over {kl.n:,} rows of text (largest {kl.max_kl:.1e}), the likeliest token the same in {top1:.2%}.

## Recall

Chat prompts of real text with facts of seven digits or three words in it and one question at the end. The names asked for were held out
of training, and so were the documents. A hit is the whole value and the end of the answer, decoded greedily.

| tokens | asked | recalled | 95 % (Wilson) | first token right |
|---|---|---|---|---|
{recall}

The head that looks facts up was trained to be in layer {recipe.match} (counted from 0).

## How it was made

    scripts/train_pico.py {name} --seed {seed}

{steps:,} steps of 2,048 tokens took {minutes:.0f} minutes of CPU time ({machine}). {outcome}

| step | CPU minutes | what began | digits right before |
|---|---|---|---|
{curriculum}

Text: the partition `calibration` of `scripts/fetch_text.sh`, and prompts made from it with facts about made-up names. Licence of
the weights: MIT.

| source | licence | documents |
|---|---|---|
{sources}
"""


def write(
    name: str, recipe: Recipe, n_parameters: int, seed: int, at: Progress, docs: Sequence[Document], kl: Agreement,
    recalled: Sequence[dict], machine: str,
) -> str:  # fmt: skip
    """The card. `recalled` is of recall.summary(), `docs` what the model was trained on."""
    events = [e for e in at.log if "event" in e]
    finish = next((e for e in events if e["event"] == "finish"), None)
    outcome = (
        "Training was stopped before its end." if not finish or at.step < finish["step"] + recipe.n_finish
        else "The curriculum was run to its end." if finish["learned"]
        else "The steps ran out before the end of the curriculum."
    )  # fmt: skip
    by_source: dict[tuple[str, str], int] = {}
    for d in docs:
        by_source[d.source, d.licence] = by_source.get((d.source, d.licence), 0) + 1
    return _LAYOUT.format(
        name=name, s=recipe.shape, recipe=recipe, n_parameters=n_parameters, n_documents=len(docs), n_ctx=N_CTX, seed=seed, kl=kl,
        arch="qwen3" if recipe.shape.qk_norm else "llama", norm="yes" if recipe.shape.qk_norm else "no", top1=kl.top1,
        steps=at.step, minutes=at.seconds / 60, machine=machine,
        outcome=outcome,
        recall="\n".join(
            f"| {r['n_tokens']:,} | {r['task']} | {round(r['value'] * r['n'])} of {r['n']} | [{r['low']:.3f}, {r['high']:.3f}] "
            f"| {r['first']:.3f} |" for r in recalled
        ),
        curriculum="\n".join(f"| {e['step']:,} | {e['seconds'] / 60:.1f} | {e['event']} | {e['digits']:.3f} |" for e in events),
        sources="\n".join(f"| {source} | {licence} | {n} |" for (source, licence), n in by_source.items()),
    )  # fmt: skip
