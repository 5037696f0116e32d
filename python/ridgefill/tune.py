"""Finding by measurement how a model should be filled: split layer, kind of maps, tail.

    1. maps of one split in the middle, and splices of single layers on planted facts: which layers' keys carry recall
    2. maps of the splits from the highest of these layers on, every kind in one pass over the text
    3. facts planted at several depths: what each recipe recalls of what the exact model does
    4. loss on held-out text, of recipes that keep recall
    5. the cheapest recipe that keeps both becomes the sidecar, with its tail

All of it runs on the calibration's own held-out documents. Everything measured is kept in a folder beside the sidecar, from
which a run that was stopped goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from . import calibrate, fit, lib, score, sidecar, sums_file
from .cost import Cost, Recipe
from .errors import RidgefillError, TextError
from .evaluation import Arm, Engine, EvaluationError, facts, loss, report, texts
from .evaluation.journal import Journal
from .fit import Report, no_report
from .splice import Splicer, splice
from .text import Document

KEY_SHARE = 0.5  # a layer carries recall when filling its keys alone loses at least this share of the facts
SCORE_TOKENS = 8192  # of held-out text, for the scores of the chosen maps
LOSSLESS = 0.95  # share of the facts that a fill keeps of which it is said that it forgets nothing
N_SPLITS = 3  # measured
N_DEPTHS = 8  # at which facts are planted in turn
TRIES = 4  # seeds drawn for each fact: text with very long words leaves prompts too short


@dataclass
class Config:
    """What to tune and how thoroughly. Rows and tokens are counts."""

    calibration: calibrate.Config  # model, text and out; its splits, kinds and tail are what is looked for
    kinds: list[str] = field(default_factory=lambda: ["kv", "kv_prev"])
    tails: list[int] = field(default_factory=lambda: [512])
    n_prompt: int = 8192  # rows of the prompts for which the cost counts
    min_recall: float = 0.95  # of the facts that the exact model recalls
    max_loss: float = 0.03  # over exact, nats
    splice_tokens: int = 12_000  # fitted for the splices
    splice_probes: int = 6
    probes: int = 24  # facts for each recipe
    probe_rows: int = 768
    probe_tail: int = 96
    windows: int = 6  # for the loss
    window_prefix: int = 2048
    window_tail: int = 256  # at most: a longer one is served at a lower loss, and told apart by cost alone
    window_scored: int = 128

    def measured(self) -> dict:
        """What the measurements depend on, besides model and text."""
        return {k: v for k, v in asdict(self).items() if k not in ("calibration", "kinds", "tails", "n_prompt", "min_recall", "max_loss")}


@dataclass
class Candidate:
    """One recipe and what was measured of it. None: not measured, because it failed before."""

    split: int
    kind: str
    tail: int
    cost: float  # relative to exact, at Config.n_prompt rows
    recall: float  # share of what exact recalls
    hits: int
    loss: float | None = None  # over exact, nats
    key_loss: float | None = None  # the same over key tokens
    pareto: bool = False


@dataclass(frozen=True)
class Tuned:
    """Result of a run. Layers are numbered from 0."""

    out: str
    base: int  # split above which single layers were exchanged
    critical: int  # highest layer whose keys carry recall, -1 where there is none
    layers: list[dict]  # of the splices, by layer
    candidates: list[Candidate]
    chosen: Candidate
    n_exact: int  # facts that the exact model recalls
    words: dict[str, int]  # facts made of words: asked, exact, filled
    keeps: bool  # whether the chosen recipe keeps recall and loss

    def sentences(self) -> list[str]:
        """The choice, explained."""
        c = self.chosen
        first = (
            f"The keys of layer {self.critical} carry recall: a split at or above {self.critical} keeps them exact."
            if self.critical >= 0
            else f"No single layer's keys carry recall: filling those of any one layer above {self.base} keeps the facts."
        )
        kept = "keeps" if self.keeps else "comes closest to keeping"
        second = (
            f"Split {c.split} with maps of kind {c.kind} and a tail of {c.tail} rows {kept} both limits: {100 * c.recall:.0f} % of "
            f"the facts that the exact model recalls"
        ) + (f", {c.loss:+.3f} nats of loss." if c.loss is not None else ".")
        third = (
            f"It costs {100 * c.cost:.0f} % of the exact prompt's multiply-adds; of facts made of words it recalls "
            f"{self.words['filled']} where exact recalls {self.words['exact']} of {self.words['asked']}."
        )
        return [first, second, third]


def critical_layers(records: Sequence[dict]) -> list[dict]:
    """By layer: share of prompts answered as exactly, and change of the answer's log-probability, in every splice.

    `carries` is set where filling the keys of this layer alone loses at least KEY_SHARE of the prompts.
    """

    def mean(name: str, il: int, what: str) -> float:
        return float(np.mean([r[what] for r in records if r["splice"] == name and r["layer"] == il]))

    whole = {name: mean(name, -1, "log_prob") for name in ("exact", "filled")}
    layers = sorted({r["layer"] for r in records if r["layer"] >= 0})
    out = []
    for il in layers:
        row = {"layer": il}
        for name in dict.fromkeys(r["splice"] for r in records if r["layer"] == il):
            base = whole["exact" if name.startswith("filled") else "filled"]
            row[name] = {"hits": mean(name, il, "hit"), "log_prob": mean(name, il, "log_prob") - base}
        row["carries"] = row["filled keys"]["hits"] <= 1 - KEY_SHARE
        out.append(row)
    return out


@dataclass(frozen=True)
class Found:
    """What splices above split `base` tell: whether its fill forgets nothing, and critical_layers()."""

    base: int
    keeps: bool
    layers: list[dict]

    @property
    def carrying(self) -> list[int]:
        """Layers whose keys carry recall, ascending."""
        return [row["layer"] for row in self.layers if row["carries"]]


class Tuner:
    """One run; see the module. `say` takes lines for the user. Use it in `with`."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda line: None, report_to: Report = no_report):
        self.config, self.say, self.report = config, say, report_to
        self.out = Path(config.calibration.out)
        self.work = self.out.with_name(f"{self.out.name}.tune")
        self.summary = self.out.with_name(f"{self.out.name}.json")
        for path in (self.out, self.summary):
            sidecar.check_writable(path, config.calibration.force)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model = lib.Model(config.calibration.model, n_gpu_layers=config.calibration.gpu_layers)

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_) -> None:
        self.model.close()

    @property
    def _sink(self) -> int:
        return self.config.calibration.sink

    #
    # maps
    #

    def _calibrate(self, name: str, splits: list[int], kinds: list[str], n_tokens: int) -> list[Document]:
        """Maps of every split and kind in the work folder; returns the held-out documents."""
        c = replace(
            self.config.calibration, splits=splits, kinds=kinds, n_tokens=n_tokens, heldout_tokens=n_tokens // 4, force=True, score=False,
            out=str(self.work / f"{name}.s{{split}}.{{kind}}.gguf"), sums=str(self.work / f"{name}.sums.npz"),
        )  # fmt: skip
        with calibrate.Calibration(c, self.say) as run:
            plan = run.plan()
            self.say(f"maps of splits {', '.join(map(str, splits))}, kinds {', '.join(kinds)}: {plan.n_tokens:,} tokens to fit")
            run.run(self._reporter(name))
            return run.prepared.selection.heldout

    def _path(self, name: str, split: int, kind: str) -> Path:
        return self.work / f"{name}.s{split}.{kind}.gguf"

    def _journal(self, name: str, **settings) -> Journal:
        about = {"model": self.model.fingerprint(1), "measured": self.config.measured(), **settings}
        return Journal(self.work / f"{name}.jsonl", json.loads(json.dumps(about)))

    #
    # text
    #

    def _facts(self, documents: Sequence[Document], kind: str, n: int) -> list[facts.FactItem]:
        """Planted facts at several depths, in documents that are long enough."""
        c = self.config
        fitting = []
        for d in documents:
            n_tokens = sum(len(self.model.tokenize(" " + s)) for s in facts.sentences(d.text))
            fitting += [d] if n_tokens >= c.probe_rows else []
        if not fitting:
            raise TextError(f"held-out text: expected a document with at least {c.probe_rows} tokens of sentences, found none")
        items = []
        for i in range(TRIES * n):
            if len(items) < n:
                depth, seed = (len(items) % N_DEPTHS + 0.5) / N_DEPTHS, 10_000 * c.calibration.seed + i
                with suppress(EvaluationError):
                    items.append(facts.make_item(self.model, fitting, kind, seed, c.probe_rows, c.probe_tail, depth, self._sink))
        if len(items) < n:
            raise TextError(f"held-out text: expected room for {n} facts of {kind}, found it for {len(items)}: give more running text")
        return items

    def _windows(self, documents: Sequence[Document]) -> list[texts.Window]:
        c = self.config
        need = c.window_prefix + c.window_scored
        fitting = [d for d in documents if len(self.model.tokenize(d.text)) >= need]
        if len(fitting) < 2:
            raise TextError(f"held-out text: expected at least 2 documents of {need} tokens, found {len(fitting)}")
        chosen = texts.spread(fitting, min(c.windows, len(fitting)))
        return texts.windows(self.model, chosen, c.window_prefix, c.window_scored, c.calibration.seed)

    #
    # stages
    #

    def _splices(self, base: int) -> list[dict]:
        """Records of all splices above split `base`."""
        c = self.config
        name = f"base{base}"
        documents = self._calibrate(name, [base], ["kv"], c.splice_tokens)
        items = self._facts(documents, "digits", c.splice_probes)
        with (
            lib.Maps(self.model, self._path(name, base, "kv")) as maps,
            Splicer(self.model, c.probe_rows + facts.N_ANSWER, c.calibration.threads, self._sink) as splicer,
        ):
            journal = self._journal(f"splices{base}", maps=maps.hash)
            layers = range(base + 1, self.model.n_layer)
            records = self._each(f"splices above {base}", items, journal, lambda item: splice(splicer, item, item.fact, maps, layers))
        if not records:
            raise RidgefillError(
                f"recall: the exact model gives none of {len(items)} planted facts, so no split can be told from another; "
                "tune another model, or give a split to ridgefill-calibrate"
            )
        return records

    def _each(self, stage: str, items: Sequence, journal: Journal, run: Callable) -> list[dict]:
        """Records of all items, those in the journal taken from it."""
        records = []
        self.report(stage, 0, len(items))
        for i, item in enumerate(items):
            key = str(getattr(item, "seed", getattr(item, "document", i)))
            records += journal.of(key, lambda item=item: run(item))
            self.report(stage, i + 1, len(items))
        return records

    def _look(self) -> Found:
        """Splices above a split in the middle, or lower while its fill forgets nothing."""
        base = self.model.n_layer // 2
        while True:
            records = self._splices(base)
            kept = float(np.mean([r["hit"] for r in records if r["splice"] == "filled" and r["layer"] == -1]))
            found = Found(base, kept >= LOSSLESS, critical_layers(records))
            if base == 1 or found.carrying or not found.keeps:
                return found
            base //= 2

    def _splits(self, found: Found) -> list[int]:
        """Those to be measured: the highest layer that carries recall and the next ones; the lowest ones where nothing is
        forgotten; where a fill forgets and no single layer tells why, some up to the last.

        Raises RidgefillError where no split above the layer that carries recall leaves a layer to be filled.
        """
        last = self.model.n_layer - 2  # the highest split with a layer above it
        if not found.carrying and not found.keeps:
            return sorted({int(s) for s in np.linspace(found.base + 1, last, N_SPLITS).round()})
        first = found.carrying[-1] if found.carrying else found.base
        if first > last:
            raise RidgefillError(
                f"recall: expected the keys that carry it below layer {last + 1}, the last, found them there: no fill keeps recall"
            )
        return list(range(first, min(first + N_SPLITS, last + 1)))

    def _recall(self, engine: Engine, recipes: Sequence[tuple[int, str]], items: Sequence, kind: str) -> dict[str, np.ndarray]:
        """Hits by arm."""
        arms = [Arm("exact"), *(Arm("fill", split, kind=k) for split, k in recipes)]
        journal = self._journal(f"recall-{kind}", arms=[a.name for a in arms], maps=[m.hash for m in engine.maps.values()])
        records = self._each(f"facts of {kind}", items, journal, lambda i: [facts.ask(engine, a, i) for a in arms])
        return {name: np.array([r["hit"] for r in rows]) for name, rows in report.by_arm(records, "seed").items()}

    def _loss(self, engine: Engine, recipes: Sequence[tuple[int, str]], windows: Sequence, tail: int) -> dict[str, dict]:
        """Summary by arm."""
        arms = [Arm("exact"), Arm("cut"), *(Arm("fill", split, kind=k) for split, k in recipes)]
        journal = self._journal(f"loss-t{tail}", arms=[a.name for a in arms], maps=[m.hash for m in engine.maps.values()])
        records = self._each("loss", windows, journal, lambda w: loss.score_window(engine, arms, w, tail))
        return report.summarise_loss(records)

    def _measure(self, splits: list[int], documents: Sequence[Document]) -> tuple[list[Candidate], Candidate, int, dict[str, int]]:
        """Candidates, the chosen one, the number of facts that exact recalls, and the facts of words with the chosen recipe."""
        c = self.config
        cost = Cost(c.calibration.model, self.model.n_layer)
        recipes = [(s, k) for s in splits for k in c.kinds]
        maps = [lib.Maps(self.model, self._path("maps", s, k)) for s, k in recipes]
        n_ctx = max(c.probe_rows + facts.N_ANSWER, c.window_prefix + c.window_scored) + 16
        with Engine(self.model, maps, n_ctx, n_threads=c.calibration.threads, n_sink=self._sink) as engine:
            hits = self._recall(engine, recipes, self._facts(documents, "digits", c.probes), "digits")
            exact, found = hits["exact"], []
            for split, kind in recipes:
                both = int((hits[Arm("fill", split, kind=kind).name] & exact).sum())
                for tail in c.tails:
                    share = cost.filled(c.n_prompt, Recipe(split, kind, tail, self._sink, c.calibration.rank)) / cost.exact(c.n_prompt)
                    found.append(Candidate(split, kind, tail, share, both / max(1, int(exact.sum())), both))
            self._add_loss(engine, found, self._windows(documents))
            chosen = self.choose(found)
            words = self._recall(engine, [(chosen.split, chosen.kind)], self._facts(documents, "words", c.probes), "words")
        for m in maps:
            m.close()
        filled = words[Arm("fill", chosen.split, kind=chosen.kind).name]
        counts = {"asked": c.probes, "exact": int(words["exact"].sum()), "filled": int((filled & words["exact"]).sum())}
        return found, chosen, int(exact.sum()), counts

    def _add_loss(self, engine: Engine, found: list[Candidate], windows: Sequence) -> None:
        """Loss of the recipes that keep recall; where none does, of the one that comes closest."""
        best = max(c.recall for c in found)
        kept = [c for c in found if c.recall >= min(self.config.min_recall, best)]
        recipes = list(dict.fromkeys((c.split, c.kind) for c in kept))
        tails = {c.tail: min(c.tail, self.config.window_tail) for c in kept}
        summaries = {tail: self._loss(engine, recipes, windows, tail) for tail in sorted(set(tails.values()))}
        for c in kept:
            s = summaries[tails[c.tail]][Arm("fill", c.split, kind=c.kind).name]
            c.loss, c.key_loss = s["over_exact"]["value"], (s["key_over_exact"] or {}).get("value")

    def keeps(self, c: Candidate) -> bool:
        """Whether a candidate is within both limits."""
        return c.recall >= self.config.min_recall and c.loss is not None and c.loss <= self.config.max_loss

    def choose(self, found: Sequence[Candidate]) -> Candidate:
        """The cheapest that keeps both limits; where none does, the one of least loss among those that keep recall best."""
        if within := [c for c in found if self.keeps(c)]:
            return min(within, key=lambda c: c.cost)
        return min((c for c in found if c.loss is not None), key=lambda c: c.loss)

    def _write(self, chosen: Candidate, documents: Sequence[Document]) -> None:
        """The sidecar of the chosen recipe, solved from the sums, with scores on the held-out documents and a self-test. It
        comes to its place when it is complete, so that a run that is stopped before goes on.
        """
        c, made = self.config.calibration, self.work / "chosen.gguf"
        wanted = replace(c, splits=[chosen.split], kinds=[chosen.kind], tail=chosen.tail, out=str(made), force=True).wanted()
        with sums_file.Reader(self.work / "maps.sums.npz") as reader:
            fit.solve(wanted, reader.header, reader.sums(), self._reporter("write"))
        pieces = score.document_pieces(self.model, documents, self._sink, SCORE_TOKENS)
        with lib.Model(c.served) if c.served else nullcontext(self.model) as served, threadpool_limits(c.threads):
            score.judge(self.model, made, pieces, documents, c.threads, served, self._reporter("write"))
        sidecar.check_writable(self.out, c.force)
        os.replace(made, self.out)

    def _reporter(self, name: str) -> Report:
        """A Report whose stages bear this name too."""
        return lambda stage, done, total: self.report(f"{name} {stage}", done, total)

    def run(self) -> Tuned:
        """Everything. Raises RidgefillError where it cannot be done; what was measured until then is kept."""
        looked = self._look()
        splits, carrying = self._splits(looked), looked.carrying
        self.say(f"keys that carry recall: {'layer ' + ', '.join(map(str, carrying)) if carrying else 'of no single layer'}")
        documents = self._calibrate("maps", splits, self.config.kinds, self.config.calibration.n_tokens)
        found, chosen, n_exact, words = self._measure(splits, documents)
        mark_pareto(found)
        self._write(chosen, documents)
        critical = carrying[-1] if carrying else -1
        return Tuned(str(self.out), looked.base, critical, looked.layers, found, chosen, n_exact, words, self.keeps(chosen))


def mark_pareto(found: Sequence[Candidate]) -> None:
    """Set `pareto` of each that none other beats in cost, recall and key-token loss at once (not measured counts as worst)."""

    def measures(c: Candidate) -> tuple[float, float, float]:
        return c.cost, -c.recall, c.key_loss if c.key_loss is not None else float("inf")

    for c in found:
        mine = measures(c)
        others = (measures(o) for o in found if o is not c)
        c.pareto = not any(o != mine and all(x <= y for x, y in zip(o, mine, strict=True)) for o in others)
