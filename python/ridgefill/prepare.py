"""From documents to the chunks that a calibration runs: parted, checked for shared text, cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .capture import Chunk, Selection, Tokens, chunks, in_share, in_turns, select
from .errors import TextError
from .lib import Model
from .overlap import N, Overlap, overlaps
from .text import Document

# what to do about documents that share text: stop, leave out the one that is not judged on, or only tell
OVERLAP = ("refuse", "drop", "keep")
PAIRS_SHOWN = 8


class OverlapError(TextError):
    """Documents that must not share text do; the message names them."""

    exit_code = 9


@dataclass(frozen=True)
class Cutting:
    """How text is parted and cut."""

    ctx: int  # tokens run together from position 0
    sink: int  # rows at the start of each chunk that are not used
    seed: int = 0  # order of the documents
    n_tokens: int = 0  # tokens to fit on, 0: all
    heldout_tokens: int = 0  # tokens to hold out, the first chunks of each document before the second ones, 0: all
    heldout_documents: int | None = None  # None: those marked so, else a sixth
    chat_share: float = 0.0  # of the documents that are put into the model's chat template
    overlap: str = "refuse"  # what to do about documents that share text: see OVERLAP
    scored: bool = False  # whether documents are kept for scores alone


@dataclass(frozen=True)
class Prepared:
    """What a calibration runs."""

    selection: Selection
    fit: list[Chunk]
    heldout: list[Chunk]
    dropped: list[str]  # names of documents that were left out for text they share

    @property
    def documents(self) -> tuple[list[Document], list[Document]]:
        """Documents to fit on and held out from which there are chunks."""
        return _used(self.fit, self.selection.fit), _used(self.heldout, self.selection.heldout)


def _used(chunk_list: list[Chunk], documents: list[Document]) -> list[Document]:
    return [documents[i] for i in sorted({c.document for c in chunk_list})]


def evaluation_documents(text: Iterable[Document], given: Iterable[Document]) -> list[Document]:
    """Documents that maps will be judged on: those of the calibration text that are marked so, and the given ones unless they
    are marked as something else.
    """
    return [d for d in text if d.partition == "evaluation"] + [d for d in given if d.partition in ("", "evaluation")]


def _cut(selection: Selection, tokens: Tokens, how: Cutting) -> tuple[list[Chunk], list[Chunk]]:
    def of(i: int, document: Document) -> list[int]:
        return tokens.chat(document) if in_share(i, how.chat_share) else tokens.plain(document)

    fit = chunks(selection.fit, of, how.ctx, how.sink, how.n_tokens)
    heldout = _some(chunks(selection.heldout, of, how.ctx, how.sink), how.heldout_tokens)
    if not fit or not heldout:
        n_fit, n_heldout = len({c.document for c in fit}), len({c.document for c in heldout})
        raise TextError(
            f"expected documents of more than {how.sink} tokens to fit and to hold out, found {n_fit} and {n_heldout}"
        )
    return fit, heldout


def _some(chunk_list: list[Chunk], n_tokens: int) -> list[Chunk]:
    """Chunks of at least `n_tokens` in all (0: all of them), from as many documents as possible."""
    taken, left = [], n_tokens or float("inf")
    for chunk in in_turns(chunk_list, lambda c: c.document):
        if left > 0:
            taken.append(chunk)
            left -= len(chunk.tokens)
    return taken if n_tokens else chunk_list


def _shared(model: Model, tokens: Tokens, prepared: Prepared, evaluation: list[Document]) -> list[tuple[Document, str]]:
    """Documents that share text with one of which they must know nothing, each with a line about it."""
    # held-out documents that give no chunk may judge the maps all the same
    fit, heldout, score = prepared.documents[0], prepared.selection.heldout, prepared.selection.score
    out = []
    for documents, of, others, of_others in (
        (fit, "to fit", heldout, "held out"),
        (fit, "to fit", evaluation, "for evaluation"),
        (heldout, "held out", evaluation, "for evaluation"),
        (fit, "to fit", score, "for scores"),
        (heldout, "held out", score, "for scores"),
        (score, "for scores", evaluation, "for evaluation"),
    ):
        found = overlaps([tokens.plain(d) for d in documents], [tokens.plain(d) for d in others])
        for o in found:
            document, other = documents[o.document], others[o.other]
            passage = _excerpt(model, tokens.plain(document), o)
            out.append((document, f"{document.name} ({of}) and {other.name} ({of_others}): {passage!r}"))
    return out


def _excerpt(model: Model, tokens: list[int], overlap: Overlap) -> str:
    text = " ".join(model.detokenize(tokens[overlap.start : overlap.start + overlap.length]).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _refusal(lines: list[str]) -> OverlapError:
    more = f"; and {len(lines) - PAIRS_SHOWN} pairs more" if len(lines) > PAIRS_SHOWN else ""
    return OverlapError(
        f"expected no {N} tokens in a row in both of two documents that are kept apart, found some in {len(lines)} "
        f"{'pair' if len(lines) == 1 else 'pairs'}: {'; '.join(lines[:PAIRS_SHOWN])}{more}. "
        "--overlap drop leaves out the first document of each pair, --overlap keep goes on with both"
    )


def prepare(
    model: Model,
    documents: list[Document],
    evaluation: list[Document],
    how: Cutting,
    warn: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Part, check and cut. `warn` is called with a line about each pair of documents that share text.

    Raises TextError when a part is empty, OverlapError when documents share text, RidgeError without a chat template.
    """
    tokens, dropped = Tokens(model), []
    selection = select(documents, how.seed, how.heldout_documents, how.scored)
    while True:
        prepared = Prepared(selection, *_cut(selection, tokens, how), dropped)
        shared = _shared(model, tokens, prepared, evaluation)
        if shared and how.overlap == "refuse":
            raise _refusal([line for _, line in shared])
        for _, line in shared:
            warn(f"{'left out' if how.overlap == 'drop' else 'shared text'}: {line}")
        if not shared or how.overlap == "keep":
            return prepared
        gone = {id(document) for document, _ in shared}
        dropped += dict.fromkeys(document.name for document, _ in shared)
        # others may move up to take their place
        selection = Selection(*([d for d in ds if id(d) not in gone] for ds in (selection.fit, selection.heldout, selection.score)))
