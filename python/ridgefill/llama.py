"""`Llama`: llama-cpp-python's class on our libllama, with ridge prefills (docs/BINDINGS.md).

    from ridgefill import Llama

    llm = Llama("model.gguf", n_ctx=8192, ridge_maps="model.ridge.gguf")
    answer = llm.create_chat_completion([{"role": "user", "content": text}])
    print(llm.ridge_last)

Here are the calls of an application and how the keywords of a call reach the prompt; llama_prefill.py does the work.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .cells import Cells
from .errors import RidgeError
from .llama_prefill import PrefillLlama, RidgePrefill, llama_cpp  # noqa: F401  (RidgePrefill is a public name of this module)
from .options import CALL_KEYWORDS, Options, take

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import RidgeKeywords

_Method = TypeVar("_Method", bound=Callable)

_UPSTREAM_COMPLETION = inspect.signature(llama_cpp.Llama.create_completion)
_UPSTREAM_GENERATE = inspect.signature(llama_cpp.Llama.generate)
# chat handlers that may put images into the cache
_IMAGE_HANDLERS = (llama_cpp.llama_chat_format.Llava15ChatHandler, llama_cpp.llama_chat_format.MTMDChatHandler)


def _takes_ridge_keywords(method: _Method) -> _Method:
    """Give an override of llama_cpp.Llama upstream's signature and text, with the keywords of ours, for help() and editors."""
    upstream = getattr(llama_cpp.Llama, method.__name__)
    signature = inspect.signature(upstream)
    ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in CALL_KEYWORDS]
    method.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *ours])  # type: ignore[attr-defined]
    method.__doc__ = f"{method.__doc__}\n\n{inspect.getdoc(upstream) or ''}"
    return method


class Llama(PrefillLlama):
    """llama_cpp.Llama on the patched libllama: prompts that are long enough are filled, all others run exactly.

    Takes what llama_cpp.Llama takes, and

    ridge_maps         the sidecar; one that does not belong to the model is refused with a warning, and prompts run exactly
    ridge_mode         "fill" (with maps), "off" (without), "plumb", "identity", "nofill"
    ridge_tail         last rows of a prompt that are always exact (the sidecar's)
    ridge_rows         further exact rows: "none", "random", "digits"
    ridge_budget       most of those: a share of the rows before the tail, or a number; 0 is no limit for digits
    ridge_seed         of the random rows (0)
    ridge_min_prompt   prompts with fewer new rows run exactly, 0 for no minimum (twice the tail)

    generate, create_completion, __call__, create_chat_completion and eval take all but ridge_maps for one call.

    Raises RidgeError (library missing or unpatched, no such file of maps, a value out of range, options that exclude each
    other), TypeError (an unknown ridge keyword), and what llama_cpp.Llama raises.
    """

    @contextmanager
    def _ridge_scope(self, options: Options, reason: str | None = None) -> Iterator[None]:
        """Calls that are made meanwhile, by llama-cpp-python or a chat handler, run with these options.

        With a reason they run exactly.
        """
        outer = self._ridge_call, self._ridge_call_reason
        self._ridge_call, self._ridge_call_reason = options.over(self._ridge_call), reason or self._ridge_call_reason
        try:
            yield
        finally:
            self._ridge_call, self._ridge_call_reason = outer

    def _ridge_result(self, result: Any) -> Any:
        """A result of upstream's. A stream runs later, and then with the options of now."""
        if not isinstance(result, Iterator):
            return result
        return self._ridge_stream(self._ridge_call, self._ridge_call_reason, result)

    def _ridge_stream(self, options: Options, reason: str | None, items: Iterator) -> Iterator:
        while True:
            with self._ridge_scope(options, reason):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    #
    # what llama_cpp.Llama offers
    #

    @_takes_ridge_keywords
    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Takes the ridge keywords of a call. With reset=False the tokens go behind what is in the cache."""
        options = take(kwargs).over(self._ridge_call).over(self._ridge_defaults)
        reset = _UPSTREAM_GENERATE.bind(self, tokens, *args, **kwargs).arguments.get("reset", True)
        return self._ridge_generate(options, self._ridge_call_reason, list(tokens), reset, args, kwargs)

    def _ridge_generate(self, options: Options, reason: str | None, tokens: list[int], reset: bool, args: tuple, kwargs: dict):
        start = time.perf_counter()
        with self._ridge_scope(options, reason):
            n_done = self._ridge_prompt(tokens, options, append=not reset)
        inner = super().generate(tokens if reset else tokens[n_done:], *args, **kwargs)
        try:
            token = next(inner)
            self._ridge_clock(start)
            while True:
                token = inner.send((yield token))
        except StopIteration:
            return

    def _ridge_clock(self, start: float) -> None:
        assert self.ridge_last
        self.ridge_last = replace(self.ridge_last, seconds=time.perf_counter() - start)

    def eval(self, tokens: Sequence[int], **ridge: Unpack[RidgeKeywords]) -> None:
        """Run tokens behind what is in the cache: exactly and as upstream does, unless a ridge keyword asks for more.

        With one, the tokens are a prompt: filled if long enough, and reported in `ridge_last`.

        Raises RidgeError when exact rows would stand behind filled ones although the call asks for exactness.
        """
        if not ridge:
            self._ridge_cells = self._ridge_cells.keep_first(self.n_tokens)
            return super().eval(tokens)
        start = time.perf_counter()
        options = take(dict(ridge)).over(self._ridge_call).over(self._ridge_defaults)
        n_done = self._ridge_prompt(list(tokens), options, append=True)
        super().eval(tokens[n_done:])
        llama_cpp.llama_synchronize(self.ctx)
        self._ridge_clock(start)

    @_takes_ridge_keywords
    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the ridge keywords of a call."""
        options = take(kwargs)
        call = _UPSTREAM_COMPLETION.bind(self, *args, **kwargs).arguments
        of_prompt = call.get("echo") and call.get("logprobs") is not None
        with self._ridge_scope(options, "logprobs" if of_prompt else None):
            return self._ridge_result(super().create_completion(*args, **kwargs))

    @_takes_ridge_keywords
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the ridge keywords of a call."""
        return self.create_completion(*args, **kwargs)

    @_takes_ridge_keywords
    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the ridge keywords of a call. With a chat handler for images every prompt runs exactly."""
        images = isinstance(self.chat_handler, _IMAGE_HANDLERS)
        with self._ridge_scope(take(kwargs), "multimodal" if images else None):
            return self._ridge_result(super().create_chat_completion(*args, **kwargs))

    def reset(self) -> None:
        """Forget the cache."""
        self._ridge_cells = Cells()
        super().reset()

    def save_state(self) -> llama_cpp.LlamaState:
        """The cache, with what is known of where its rows come from.

        Raises RidgeError for rows of mode nofill, whose marks are not part of a state.
        """
        cells = self._ridge_cells.keep_first(self.n_tokens)
        if not cells.portable:
            raise RidgeError("a cache with rows of mode 'nofill' cannot be saved: they are marked inside of the context only")
        state = super().save_state()
        state.ridge_cells = cells  # type: ignore[attr-defined]
        return state

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Put a saved cache back. Filled rows are known as such, also to an object with other maps or none.

        Raises RuntimeError when the library refuses the state; the cache is empty then.
        """
        try:
            super().load_state(state)
        except BaseException:
            self.reset()  # it may be half written
            raise
        self._ridge_cells = getattr(state, "ridge_cells", Cells())  # a state of llama_cpp.Llama has no filled rows

    def close(self) -> None:
        """Free maps, context and model."""
        if "_stack" in self.__dict__:  # not when the constructor refused its arguments
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        given = {f"ridge_{name}": value for name, value in vars(self._ridge_given).items()}
        return {**super().__getstate__(), "ridge_maps": self._ridge_path, **given}
