"""What llama-cpp-python's class needs in order to fill prompts: the maps, what is known of the cache, and the sweeps.

`Llama` (llama.py) adds the calls of an application. A prompt is planned before llama-cpp-python's own generate() runs: rows
that it may not reuse are dropped from the cache, the sweeps put rows into it, and generate() finds them there as a cached
prefix. Everything behind them is upstream's.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import lib, native
from .cells import Cells
from .errors import RidgeError
from .options import Options, check_maps_path, refuse_unknown

native.load()  # before llama_cpp is imported: it loads whatever library it finds first

import llama_cpp

_N_SINK = 4  # rows that are too few to be worth reusing, where no sidecar says so; the library's own number of sink rows
_UPSTREAM_INIT = inspect.signature(llama_cpp.Llama.__init__)
# llama_ridge_status of a prefill that failed, as llama-server names it
_FAILED = {-2: "unsupported", -3: "no_space", -7: "no_memory"}
# reasons that lie in how the object was made or called
_MESSAGES = {
    "speculative": "a draft model is active, and its use needs the logits of every row",
    "logprobs": "log-probabilities of the prompt itself were asked for, and filled rows have no logits",
    "lora": "a LoRA is active, and the maps were fitted without it",
    "multimodal": "the chat handler may put images into the cache",
    "cache": "a cache is set, and the marks of mode nofill do not follow a state into it",
}


@dataclass(frozen=True)
class RidgePrefill:
    """What became of the rows of one prompt: rows = filled + exact + cached.

    mode            that was asked for
    rows            tokens of the prompt, those found in the cache included
    filled          rows whose upper layers were predicted
    exact           rows that ran every layer
    cached          rows that were in the cache already
    cached_filled   rows among them that an earlier prompt had filled
    reason          why the prompt ran exactly, None when the sweeps ran (docs/BINDINGS.md lists the reasons)
    message         more about the reason, for people; "" if there is no more to say
    tail            rows at the end that had to be exact; None without maps
    seconds         wall-clock time from the start of the prompt to its first token (of eval(): to its end)
    lower_seconds   of these, sweep 1: lower layers and fill
    upper_seconds   sweep 2: upper layers of exact rows. The end of the prompt, which is upstream's, is in neither
    """

    mode: str
    rows: int
    filled: int
    exact: int
    cached: int
    cached_filled: int
    reason: str | None
    message: str = ""
    tail: int | None = None
    seconds: float = 0.0
    lower_seconds: float = 0.0
    upper_seconds: float = 0.0


class _Model(lib.Model):
    """The model of a llama_cpp.Llama, which owns it."""

    def __init__(self, llama: llama_cpp.Llama):
        self._ptr, self._vocab, self.path = llama.model, llama._model.vocab, llama.model_path

    def _free(self, ptr) -> None:
        pass


class _Context(lib.Context):
    """The context of a llama_cpp.Llama, which owns it; for prefills only."""

    def __init__(self, llama: llama_cpp.Llama):
        self._ptr = llama.ctx

    def _free(self, ptr) -> None:
        pass


class PrefillLlama(llama_cpp.Llama):
    """llama_cpp.Llama with maps and with the provenance of its cache. See Llama for the keywords."""

    ridge_last: RidgePrefill | None
    """Of the last prompt, None before the first. In a stream it is there with the first token."""

    def __init__(
        self,
        model_path: str,
        *,
        ridge_maps: str | os.PathLike | None = None,
        ridge_mode: str | None = None,
        ridge_tail: int | None = None,
        ridge_rows: str | None = None,
        ridge_budget: float | None = None,
        ridge_seed: int | None = None,
        ridge_min_prompt: int | None = None,
        **kwargs: Any,
    ):
        refuse_unknown(kwargs, _UPSTREAM_INIT.parameters)
        self._ridge_path = check_maps_path(ridge_maps)
        self._ridge_given = Options(ridge_mode, ridge_tail, ridge_rows, ridge_budget, ridge_seed, ridge_min_prompt).checked()
        self._ridge_given.checked_together()
        if self._ridge_path is None and ridge_mode not in (None, "off"):
            raise RidgeError(f"ridge_mode={ridge_mode!r} needs ridge_maps, found none")
        if self._ridge_path is not None and kwargs.get("embedding"):
            raise RidgeError("ridge_maps cannot be used with embedding=True: expected an object of completions")

        self._ridge_defaults = self._ridge_given.over(Options(mode="off" if self._ridge_path is None else "fill"))
        self._ridge_call = Options()  # of the call that is running
        self._ridge_call_reason: str | None = None  # why it must run exactly, "multimodal" or "logprobs"
        self._ridge_cells = Cells()
        self.ridge_last = None
        super().__init__(model_path, **kwargs)
        self._ridge_load()

    def _ridge_load(self) -> None:
        self._ridge_maps: lib.Maps | None = None
        self._ridge_no_maps, self._ridge_message = "no_maps", ""
        if self._ridge_path is None:
            return
        model, self._ridge_ctx = _Model(self), _Context(self)
        unsupported = native.ridge("llama_ridge_unsupported")(self.ctx)
        if unsupported:
            self._ridge_no_maps, self._ridge_message = "unsupported", unsupported.decode()
        else:
            try:
                with lib.captured_log() as log:
                    self._ridge_maps = lib.Maps(model, self._ridge_path)
                native.print_log(log)
                self._stack.callback(self._ridge_maps.close)
            except RidgeError as e:
                self._ridge_no_maps, self._ridge_message = "refused", str(e)
        reason = self._ridge_reason(Options(mode="fill"))
        if reason:
            message = self._ridge_message or _MESSAGES[reason]
            warnings.warn(f"ridge: every prompt runs exactly ({reason}): {message}", RuntimeWarning, stacklevel=3)

    @property
    def ridge_props(self) -> dict[str, Any]:
        """The maps (file, content hash, kind, split) and the options of calls that name none; why there are no maps."""
        maps, o = self._ridge_maps, self._ridge_defaults
        loaded = maps and {"hash": maps.hash, "kind": maps.kind, "split": maps.split, "sink": maps.n_sink, "size": maps.size}
        return {
            "maps": self._ridge_path, "reason": None if maps else self._ridge_no_maps, "message": self._ridge_message,
            **(loaded or {}),
            "mode": o.mode, "tail": self._ridge_tail(o), "rows": o.rows or "none", "budget": o.budget or 0, "seed": o.seed or 0,
            "min_prompt": self._ridge_min_prompt(o),
        }  # fmt: skip

    #
    # deciding
    #

    def _ridge_tail(self, o: Options) -> int | None:
        return int(o.tail) if o.tail else self._ridge_maps.n_tail if self._ridge_maps else None

    def _ridge_min_prompt(self, o: Options) -> int | None:
        tail = self._ridge_tail(o)
        return o.min_prompt if o.min_prompt is not None else 2 * tail if tail else None

    def _ridge_reason(self, o: Options) -> str | None:
        """Why a prompt cannot be filled, whatever its length."""
        if o.mode == "off":
            return "off"
        if self._ridge_maps is None:
            return self._ridge_no_maps
        if self.draft_model is not None:
            return "speculative"
        if self.lora_path:
            return "lora"
        if self._ridge_call_reason:
            return self._ridge_call_reason
        if o.mode == "nofill" and self.cache:
            return "cache"
        return None

    def _ridge_provenance(self, mode: str | None) -> str:
        """What two fills must have in common for their rows to be of one kind: content, never a file name."""
        maps = self._ridge_maps
        return f"{maps.hash}/{maps.kind}/{mode}/{maps.split}" if maps else ""

    def _ridge_reuse(self, tokens: list[int], pure_only: bool, tail: int) -> int:
        """Rows of the cache that a prompt may stand on; takes away from generate() what it may not."""
        cached = self.input_ids[: min(self.n_tokens, len(tokens))]
        differs = np.flatnonzero(cached != np.asarray(tokens[: len(cached)], cached.dtype))
        n_common = int(differs[0]) if len(differs) else len(cached)
        if n_common == len(tokens) and not (self.n_tokens == n_common and not self._requires_eval):
            n_common -= 1  # generate() runs the last row again to have its logits

        if self._ridge_call_reason == "logprobs":  # rows of any sweep lack their logits
            lacking = np.flatnonzero(np.isnan(self.scores[:n_common, 0]))
            n_common = int(lacking[0]) if len(lacking) else n_common
        # filled rows where the prompt has its own exact tail run again
        n_past = min(n_common, self._ridge_cells.first_filled(0 if pure_only else len(tokens) - tail))
        # a handful of sink rows is not worth it: without them the prompt is cut where a cold run cuts it
        if n_past < n_common and n_past <= (self._ridge_maps.n_sink if self._ridge_maps else _N_SINK):
            n_past = 0
        # at once: what is forgotten below must never come back, even if generate() fails before it runs a row
        if n_past < self.n_tokens:
            self.n_tokens, self._requires_eval = n_past, True
        return n_past

    #
    # running
    #

    def _ridge_prompt(self, tokens: list[int], o: Options, append: bool) -> int:
        """Plan a prompt, run its sweeps if it is to be filled, and report. Gives the number of `tokens` the sweeps ran.

        With `append` the tokens go behind what is in the cache; else they are the whole prompt, and rows of the cache that
        it may not reuse are dropped.
        """
        o = o.checked_together()
        mode, tail, reason = o.mode or "off", self._ridge_tail(o), self._ridge_reason(o)
        pure_only = bool(reason) or self._ridge_cells.made_by != self._ridge_provenance(mode)  # of mode plumb there are none
        if append:
            n_past = self.n_tokens
            self._ridge_cells = self._ridge_cells.keep_first(n_past)
            if pure_only and self._ridge_cells:
                raise RidgeError(
                    f"the cache holds {len(self._ridge_cells.filled)} filled rows, and rows in mode {mode!r}"
                    f"{f' ({reason})' if reason else ''} cannot be put behind them; call reset() first"
                )
            tokens = self.input_ids[:n_past].tolist() + tokens
        else:
            n_past = self._ridge_reuse(tokens, pure_only, tail or 0)
            self._ridge_cells = self._ridge_cells.keep_first(n_past)

        n_filled = len(self._ridge_cells.filled)
        last = RidgePrefill(mode, len(tokens), 0, len(tokens) - n_past, n_past, n_filled, reason, tail=tail)
        if not reason:
            assert tail and self._ridge_maps
            n_new = len(tokens) - n_past
            if n_new < (self._ridge_min_prompt(o) or 0) or n_new <= tail:
                last = replace(last, reason="short")
            else:
                last = self._ridge_sweeps(tokens, n_past, o, last)
        elif reason != "off":
            last = replace(last, message=_MESSAGES.get(reason, self._ridge_message))
        self.ridge_last = last
        if self.verbose:
            print(f"ridge: {last}", file=sys.stderr)
        return self.n_tokens - n_past if last.reason is None else 0

    def _ridge_rows(self, new: list[int], n_past: int, o: Options, tail: int) -> list[int]:
        """Rows, counted from n_past, that run exactly although they are neither sink nor tail."""
        assert self._ridge_maps
        row0, row1 = max(0, self._ridge_maps.n_sink - n_past), len(new) - tail
        if row0 >= row1 or o.rows in (None, "none"):
            return []
        return lib.select_rows(o.rows, self._ridge_maps.model, new, row0, row1, float(o.budget or 0), int(o.seed or 0))

    def _ridge_sweeps(self, tokens: list[int], n_past: int, o: Options, plan: RidgePrefill) -> RidgePrefill:
        """Put the rows from n_past on into the cache that the sweeps can; the report says why when they cannot."""
        new = tokens[n_past:]
        if len(tokens) > len(self.input_ids):
            return replace(plan, reason="no_space", message=f"expected at most {len(self.input_ids)} rows, found {len(tokens)}")
        # what is behind is gone in any case, whether the sweeps end or not
        self._ctx.kv_cache_seq_rm(0, n_past, -1)
        self.n_tokens, self._requires_eval = n_past, True
        rows = self._ridge_rows(new, n_past, o, plan.tail or 0)
        try:
            with self._ridge_ctx.prefill(
                new, pos0=n_past, mode=plan.mode, maps=self._ridge_maps, n_tail=plan.tail or 0, exact_rows=rows
            ) as prefill:  # leaving an unfinished one removes its rows
                if plan.mode != "plumb" and not len(prefill.filled):
                    return replace(plan, reason="short")
                prefill.run()
                n_done, filled, stats = prefill.n_done, prefill.filled, prefill.stats
        except RidgeError as e:
            return replace(plan, reason=_FAILED.get(e.status or 0, "error"), message=str(e))

        self.input_ids[n_past : n_past + n_done] = new[:n_done]
        if self._logits_all:
            self.scores[n_past : n_past + n_done] = np.nan
        self.n_tokens = n_past + n_done
        made_by, portable = self._ridge_provenance(plan.mode), plan.mode != "nofill"
        self._ridge_cells = self._ridge_cells.add(made_by, portable, (filled + n_past).tolist())
        return replace(
            plan, filled=len(filled), exact=plan.exact - len(filled),
            lower_seconds=stats["t_lower_us"] / 1e6, upper_seconds=stats["t_upper_us"] / 1e6,
        )  # fmt: skip
