"""The curriculum: sequences grow from 64 to 1,024 tokens as the model learns to look facts up.

The hurdle is the first token of a value, the match of a name. What gets over it: layer 0 is made to keep the tokens just before
each row (heads that predict them, while sequences are short), and one late head is rewarded for attending to the row that holds
the token to be said. Matrices are trained with Muon, embeddings and norms with AdamW.

A run is resumed exactly: batches depend on seed, step and stage alone, and everything else is in the state that is saved.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..progress import duration
from ..stopping import StopRequest
from .data import Batch, Corpus, batch
from .model import Pico
from .recipes import N_VOCAB, STAGES, STEP_TOKENS, PicoError, recipe

REACH_WEIGHT = 0.3
CLIP = 1.0
N_LOG = 50  # steps between two records of the log
N_SAVE = 100


@dataclasses.dataclass
class Progress:
    """Where a run is. `digits` are (right, asked) of the last steps, `recent` what step() gave since the last
    record of the log, `seconds` the CPU time of all steps."""

    step: int = 0
    stage: int = 0
    finish_at: int = -1  # step at which the learning rates began to fall
    digits: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    recent: list[dict] = dataclasses.field(default_factory=list)
    log: list[dict] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


class Trainer:
    """A model in training.

    name    of a recipe
    corpus  documents of the calibration partition
    folder  where state.pt and log.json are written
    fast    compile the layers, which needs a C++ compiler, some seconds for each length, and saves a third of a step

    Raises PicoError for an unknown recipe.
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, corpus: Corpus, folder: Path, seed: int = 0, device: str = "cpu", fast: bool = False
    ):
        self.name, self.recipe, self.tokenizer, self.corpus = name, recipe(name), tokenizer, corpus
        self.folder, self.seed, self.device, self.at = folder, seed, device, Progress()
        torch.manual_seed(seed)
        shape = self.recipe.shape
        self.model = Pico(shape).to(device)
        self.reach = nn.ModuleList(nn.Linear(shape.width, N_VOCAB, bias=False) for _ in range(STAGES[0].reach)).to(device)
        if fast:
            for layer in self.model.model["layers"]:
                layer.compile(dynamic=False)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n] + list(self.reach.parameters())
        self.optimizers = [
            torch.optim.Muon(matrices, lr=self.recipe.lr_matrix, weight_decay=0.01),
            torch.optim.AdamW(others, lr=self.recipe.lr_other, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        digits = torch.tensor([tokenizer.token_to_id(d) for d in "0123456789"], device=device)
        self.is_digit = torch.zeros(N_VOCAB, dtype=torch.bool, device=device).index_fill_(0, digits, True)

    #
    # one step
    #

    def losses(self, b: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Terms of the loss, and counts of what was said right."""
        stage, r = STAGES[self.at.stage], self.recipe
        states, first, seen = self.model(b.tokens, look=(r.match, r.hop))
        target, weight, text = b.tokens[:, 1:], b.answer[:, 1:], b.text[:, 1:]
        wanted = (weight > 0) | text
        logits = self.model.logits(states[:, :-1][wanted])
        ce = F.cross_entropy(logits, target[wanted], reduction="none")
        w, is_text = weight[wanted], text[wanted]
        terms = {
            "answer": (ce * w).sum() / w.sum().clamp(min=1),
            "text": r.text_weight * (ce * is_text).sum() / is_text.sum().clamp(min=1),
            "copy": r.reward * attended(*seen[r.match], *b.copies),
            "hop": r.reward * attended(*seen[r.hop], *b.hops),
        }
        if stage.reach:
            terms["reach"] = REACH_WEIGHT * reached(first, b.tokens, self.reach)
        right = logits.detach().argmax(-1) == target[wanted]
        digits = self.is_digit[target[wanted]] & (w > 0)
        firsts = w > 1
        counts = {
            "digits": int((right & digits).sum()), "n_digits": int(digits.sum()),
            "first": int((right & firsts).sum()), "n_first": int(firsts.sum()),
        }  # fmt: skip
        return terms, counts

    def step(self) -> dict[str, float]:
        """Train on one batch: terms of the loss, and counts."""
        at, r = self.at, self.recipe
        fraction = 1.0 if at.finish_at < 0 else max(0.0, 1 - (at.step - at.finish_at) / r.n_finish)
        for optimizer, lr in zip(self.optimizers, (r.lr_matrix, r.lr_other), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * fraction
        b = batch(self.tokenizer, self.corpus, r, STAGES[at.stage], self.seed, at.step, self.device)
        terms, counts = self.losses(b)
        loss = torch.stack(list(terms.values())).sum()
        if not torch.isfinite(loss):
            raise PicoError(f"{self.name}, step {at.step}: expected a finite loss, found {loss.item()}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        at.step += 1
        at.digits = [*at.digits[1 - r.n_window :], (counts["digits"], counts["n_digits"])]
        return {name: t.item() for name, t in terms.items()} | counts

    def advance(self) -> None:
        """Longer sequences, or the finish, where digits are right often enough or steps run out."""
        at, r = self.at, self.recipe
        if at.finish_at >= 0:
            return
        accuracy = sum(right for right, _ in at.digits) / max(1, sum(n for _, n in at.digits))
        learned = len(at.digits) == r.n_window and accuracy >= r.advance
        last = at.stage == len(STAGES) - 1
        if at.step >= r.n_steps - r.n_finish or learned and last:
            at.finish_at = at.step
            event = {"event": "finish", "learned": learned and last}
        elif learned:
            at.stage, at.digits = at.stage + 1, []
            event = {"event": f"sequences of {STAGES[at.stage].n_tokens:,} tokens"}
        else:
            return
        at.log.append({"step": at.step, **event, "digits": round(accuracy, 4), "seconds": round(at.seconds, 1)})

    @property
    def done(self) -> bool:
        return self.at.finish_at >= 0 and self.at.step >= self.at.finish_at + self.recipe.n_finish

    #
    # a run
    #

    def run(self, n_steps: int | None = None) -> bool:
        """Train until it is done, or n_steps more; whether it is done. State and log are saved on the way and at the end."""
        first, logged, began = self.at.step, self.at.step, time.monotonic()
        with StopRequest("stopping after this step, to save the state") as stop:
            while not self.done and not stop.asked and (n_steps is None or self.at.step < first + n_steps):
                start = time.process_time()
                self.at.recent.append(self.step())
                self.at.seconds += time.process_time() - start
                self.advance()
                if self.at.step % N_LOG == 0:
                    self._log((time.monotonic() - began) / (self.at.step - logged))
                    logged, began = self.at.step, time.monotonic()
                if self.at.step % N_SAVE == 0:
                    self.save()
        self.save()
        return self.done

    def _log(self, seconds: float) -> None:
        """Keep and show the means since the last record; `seconds` is what a step takes."""
        at, r, recent = self.at, self.recipe, self.at.recent
        at.recent = []

        def mean(name: str) -> float:
            return sum(x.get(name, 0) for x in recent) / len(recent)

        entry = {
            "step": at.step, "n_tokens": STAGES[at.stage].n_tokens, "seconds": at.seconds,
            "answer": mean("answer"), "text": mean("text") / r.text_weight,
            "copy": mean("copy") / r.reward, "hop": mean("hop") / r.reward, "reach": mean("reach") / REACH_WEIGHT,
            "digits": mean("digits") / max(1e-9, mean("n_digits")), "first": mean("first") / max(1e-9, mean("n_first")),
        }  # fmt: skip
        at.log.append({k: round(v, 4) for k, v in entry.items()})
        end = r.n_steps if at.finish_at < 0 else at.finish_at + r.n_finish
        print(
            f"{self.name}: step {at.step:,} of at most {end:,}, {entry['n_tokens']:,} tokens long: "
            f"digits {entry['digits']:.3f}, first {entry['first']:.3f}, loss of answers {entry['answer']:.3f}, of text {entry['text']:.3f}; "
            f"{STEP_TOKENS / seconds:,.0f} tokens/s, at most {duration((end - at.step) * seconds)} left",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    #
    # its state
    #

    def _what(self) -> dict:
        """What another run differs in."""
        recipe = repr((self.recipe, STAGES))
        return {"name": self.name, "seed": self.seed, "recipe": recipe, "tokenizer": self.tokenizer.to_str()}

    def save(self) -> None:
        state = {
            "what": self._what(), "at": dataclasses.asdict(self.at), "model": self.model.state_dict(),
            "reach": self.reach.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "state.part"
        torch.save(state, part)
        os.replace(part, self.folder / "state.pt")
        (self.folder / "log.json").write_text("[\n" + ",\n".join(map(json.dumps, self.at.log)) + "\n]\n")

    def load(self) -> None:
        """Go on from state.pt. Raises PicoError when it is of another run."""
        path = self.folder / "state.pt"
        state = torch.load(path, map_location=self.device, weights_only=True)
        for key, expected in self._what().items():
            if state["what"].get(key) != expected:
                raise PicoError(f"{path}: expected the state of a run with the same {key}, found another; --fresh begins anew")
        self.at = Progress(**state["at"])
        self.model.load_state_dict(state["model"])
        self.reach.load_state_dict(state["reach"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def attended(q: Tensor, k: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
    """Mean of -log of the attention mass that the first head puts, at `rows` [b, n], on the rows where `wanted` [b, n, t]."""
    q, k = q[:, 0], k[:, 0]
    chosen = q.gather(1, rows[..., None].expand(-1, -1, q.shape[-1]))
    scores = chosen @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    later = torch.arange(k.shape[1], device=k.device) > rows[..., None]
    mass = scores.masked_fill(later, -torch.inf).softmax(-1).mul(wanted).sum(-1)
    asked = wanted.any(-1)
    return -(mass[asked] + 1e-6).log().sum() / asked.sum().clamp(min=1)


def reached(first: Tensor, tokens: Tensor, heads: nn.ModuleList) -> Tensor:
    """Cross entropy of the tokens before each row from layer 0's output, one head for each distance; every third row is taken."""
    terms = []
    for distance, head in enumerate(heads, 1):
        logits = head(first[:, distance::3])
        terms.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, : tokens.shape[1] - distance : 3].flatten()))
    return torch.stack(terms).mean()
