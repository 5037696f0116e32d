"""Plumb runs the whole machinery of a ridge prefill with every row exact, and must give upstream's bits.

Two contexts of one model go the same way: `plumb` through the prefill object, `stock` through plain decode with the same
cuts, the same cell layout and the same interleaving with other sequences. The rows left to decode, and a few tokens after
them, must have equal logits, and every layer of the cache equal K and V. Batch, ubatch and threads are fixed: another
cut gives other bits in upstream itself.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from ridgefill.lib import Context, Model

UBATCH = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration. Lengths in rows; `others` are lengths of sequences 1.. that are there before the prompt."""

    name: str
    n: int = 3 * UBATCH + 7
    arch: str = "llama"
    ftype: str = "f16"  # matrices whose products depend on the cut, so that a moved cut would show
    head: int = 64
    temperature: bool = False
    flash: bool = True
    kv: str = "f16"
    split: int = 4
    tail: int = 16
    n_batch: int = 2 * UBATCH
    n_step: int = 0
    others: tuple[int, ...] = ()
    unified: bool = False
    again: str = ""  # "": one prompt; "removed": a second one in its place; "behind": a second one behind it


def cases() -> list[Case]:
    out = []
    for k in (1, 2, 3):
        for d in (-1, 0, 1):
            for flash in (True, False):
                out.append(Case(f"n-{k}u{d:+d}-{'fa' if flash else 'nofa'}", n=k * UBATCH + d, flash=flash))
    out += [Case(f"split-{s}", split=s) for s in range(1, 8)]
    for head in (64, 32):
        out += [
            Case(f"kv-q8_0-head{head}", head=head, kv="q8_0"),
            Case(f"kv-q8_0-head{head}-behind", head=head, kv="q8_0", again="behind"),
            Case(f"kv-f16-head{head}-nofa", head=head, flash=False),
        ]
    out += [
        Case("q8_0", ftype="q8_0"),
        Case("q8_0-nofa", ftype="q8_0", flash=False),
        Case("f32", ftype="f32"),
        Case("tail-1", tail=1),
        Case("tail-more-than-ubatch", tail=2 * UBATCH + 5),
        Case("tail-more-than-prompt", tail=1000),
        Case("batch-no-multiple-of-ubatch", n_batch=UBATCH + 13, n=200),
        Case("small-steps", n_step=20, n=150),
        Case("removed", again="removed"),
        Case("removed-nofa", again="removed", flash=False),
        Case("behind", again="behind"),
    ]
    for unified in (False, True):
        kind = "unified" if unified else "split"
        out += [
            Case(f"np3-{kind}", others=(21, 50), unified=unified),
            Case(f"np3-{kind}-nofa", others=(21, 50), unified=unified, flash=False),
            Case(f"np3-{kind}-kv-q8_0", others=(21, 50), unified=unified, kv="q8_0"),
            Case(f"np3-{kind}-behind", others=(21, 50), unified=unified, again="behind"),
            Case(f"np3-{kind}-removed-qwen3", others=(40, 3), unified=unified, again="removed", arch="qwen3"),
        ]
    for arch in ("qwen2", "qwen3", "qwen3moe", "mistral3"):
        out += [
            Case(f"{arch}-f32-fa", arch=arch, ftype="f32"),
            Case(f"{arch}-f16-nofa", arch=arch, flash=False, split=2),
            Case(f"{arch}-q8_0-fa", arch=arch, ftype="q8_0", split=7),
        ]
    out += [
        Case("mistral3-temperature", arch="mistral3", temperature=True),
        Case("smollm2-fa", arch="smollm2", split=15),
        Case("smollm2-nofa", arch="smollm2", split=19, flash=False),
        Case("smollm2-kv-q8_0-np3", arch="smollm2", split=29, kv="q8_0", others=(21, 50), unified=True),
    ]
    return out


def stock_cuts(n: int, n_batch: int, n_step: int) -> list[int]:
    """First rows of the ubatches into which upstream cuts n rows: batches first, then ubatches within each."""
    return [u for b in range(0, n, n_batch) for u in range(b, min(b + n_batch, n), n_step)]


class Run:
    """One context on its way through a case; collects every logit it is asked for."""

    def __init__(self, model: Model, case: Case):
        self.case, self.model = case, model
        n_seq = 1 + len(case.others)
        self.ctx = Context(model, n_ctx=1024 * (1 if case.unified else n_seq), n_batch=case.n_batch, n_ubatch=UBATCH,
                           n_seq_max=n_seq, kv_unified=case.unified, flash_attn=case.flash,
                           type_k=case.kv, type_v=case.kv, n_threads=1)
        self.rng = np.random.default_rng(11)
        self.next = [0] * n_seq  # next position of each sequence
        self.logits: list[np.ndarray] = []

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(3, 280, n).tolist()

    def decode(self, seq: int, tokens: list[int], logits: str = "all") -> None:
        self.logits.append(self.ctx.decode(tokens, pos0=self.next[seq], seq=seq, logits=logits))
        self.next[seq] += len(tokens)

    def neighbours(self) -> None:
        """One token of every other sequence, as a server decodes them between two steps."""
        for seq in range(1, 1 + len(self.case.others)):
            self.decode(seq, self.tokens(1))

    def go(self, prompt: Callable[[Run, list[int]], None]) -> Run:
        c = self.case
        for seq, n in enumerate(c.others, 1):
            self.decode(seq, self.tokens(n), "last")
        prompt(self, self.tokens(c.n))
        self.decode(0, self.tokens(1))
        if c.again == "removed":
            self.ctx.seq_rm(0)
            self.next[0] = 0
        if c.again:
            prompt(self, self.tokens(c.n + 5))
            self.decode(0, self.tokens(1))
        self.neighbours()
        return self

    def cache(self) -> list[np.ndarray]:
        """K and V of every sequence and layer."""
        return [self.ctx.get_kv(seq, il, what, 0, self.next[seq])
                for seq in range(len(self.next)) for il in range(self.model.n_layer) for what in "kv"]


def stock_prompt(run: Run, tokens: list[int]) -> None:
    """Through decode, cut where plumb cuts; the neighbours also get the turns that plumb's second sweep gives them."""
    c = run.case
    n_done = stock_cuts(len(tokens), c.n_batch, UBATCH)[-1]
    cuts = [u for u in stock_cuts(len(tokens), c.n_batch, c.n_step or UBATCH) if u < n_done]
    for first, end in zip(cuts, [*cuts[1:], n_done]):  # no cuts: nothing before n_done = 0
        run.decode(0, tokens[first:end], "none")
        run.neighbours()
    for _ in cuts:
        run.neighbours()
    run.decode(0, tokens[n_done:])


def ridge_prompt(mode: str) -> Callable[[Run, list[int]], None]:
    def prompt(run: Run, tokens: list[int]) -> None:
        c = run.case
        with run.ctx.prefill(tokens, seq=0, pos0=run.next[0], mode=mode, split=c.split, n_tail=c.tail, n_step=c.n_step) as p:
            done = p.stats["n_steps"] == 0
            while not done:
                done = p.step()
                run.neighbours()
            assert p.stats["i_step"] == p.stats["n_steps"]
            if mode == "plumb":
                assert p.stats["n_filled"] == 0 and p.stats["n_steps"] == 2 * p.stats["n_steps_lower"]
            n_done = p.n_done
        run.next[0] += n_done
        run.decode(0, tokens[n_done:])

    return prompt


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> str:
    """Where two lists of arrays first differ and by how much; empty if their bytes are the same."""
    a, b = ([x for x in side if x.size] for side in (a, b))
    if [x.shape for x in a] != [x.shape for x in b]:
        return f"shapes differ: {[x.shape for x in a]} and {[x.shape for x in b]}"
    bad = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x.tobytes() != y.tobytes()]
    if not bad:
        return ""
    worst = max(float(np.abs(a[i].astype(np.float64) - b[i]).max()) for i in bad)
    return f"{len(bad)} of {len(a)} arrays differ, the first is {bad[0]}; max abs difference {worst:.3g}"


@pytest.fixture(scope="module")
def load(pico_model, smollm2, patched_lib):
    models: dict = {}

    def get(case: Case) -> Model:
        key = (case.arch, case.ftype, case.head, case.temperature)
        if key not in models:
            path = smollm2 if case.arch == "smollm2" else pico_model(
                case.arch, ftype=case.ftype, head=case.head, temperature=case.temperature)
            models[key] = Model(path)
        return models[key]

    yield get
    for m in models.values():
        m.close()


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
@pytest.mark.field_report(14, "llama-ridge-prefill.cpp", "pass.n_kv = pf.n_kv[step.rows.back()];", "pass.n_kv = pf.n_kv[0];")
def test_plumb_is_stock(load, case):
    model = load(case)
    stock = Run(model, case).go(stock_prompt)
    plumb = Run(model, case).go(ridge_prompt("plumb"))
    assert min(float(x.std()) for x in stock.logits if x.size) > 0.1, "degenerate logits prove nothing"
    assert (d := difference(stock.logits, plumb.logits)) == "", f"logits: {d}"
    assert (d := difference(stock.cache(), plumb.cache())) == "", f"cache: {d}"


def test_enough_cases():
    names = [c.name for c in cases()]
    assert len(set(names)) == len(names) >= 24


@pytest.mark.parametrize("mode", ["identity", "nofill"])
def test_a_fill_differs(load, mode):
    """The comparison sees a fill: predicted or missing upper rows change the logits of the tail."""
    case = Case("control", n=4 * UBATCH)
    model = load(case)
    stock = Run(model, case).go(stock_prompt)
    filled = Run(model, case).go(ridge_prompt(mode))
    last = [r.logits[-1] for r in (stock, filled)]  # the token after the prompt
    assert last[0].shape == last[1].shape
    assert np.abs(last[0] - last[1]).max() > 1e-3


def test_a_moved_cut_differs(load):
    """The comparison sees a single ubatch cut elsewhere, or else equal bits above prove little."""
    case = Case("control", n=3 * UBATCH)
    model = load(case)

    def moved(run: Run, tokens: list[int]) -> None:
        run.decode(0, tokens[:1], "none")
        run.decode(0, tokens[1:2 * UBATCH], "none")
        run.decode(0, tokens[2 * UBATCH:])

    stock, other = (Run(model, case).go(way).logits for way in (stock_prompt, moved))
    assert "max abs difference" in difference(stock, other)
