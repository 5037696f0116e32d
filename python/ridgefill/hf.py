"""Layer inputs from a Hugging Face checkpoint, run by transformers: the second source beside the library (`capture`).

The maps are for a GGUF of the same model, so tokens come from that file's tokenizer and the two are compared before
anything runs. torch and transformers are imported only when a checkpoint is opened.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator

import gguf
import numpy as np

from .capture import Chunk
from .errors import RidgefillError
from .lib import Model
from .model_file import ModelFile

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

# architecture of a GGUF: model types of transformers with these very layers, whose parts have the names used below
MODEL_TYPES = {
    "llama": ("llama", "mistral"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
    "mistral3": ("ministral3",),
}

# what is compared of a layer, by names of the GGUF and of transformers; matrices whose rows stand in the same order in both
NORMS = {"attn_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight"}
MATRICES = {
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "ffn_down_exps": "mlp.experts.down_proj",
}
ROWS = 256  # of a matrix: a fine-tune changes all of them, and large models take long to dequantise


class CheckpointError(RidgefillError):
    """A checkpoint cannot be used: packages missing, not loadable, of another model than the GGUF."""

    exit_code = 3


def is_checkpoint(model: str) -> bool:
    """Whether a model is given as a checkpoint: a folder, or a name of the hub (OWNER/NAME, and no such file)."""
    if os.path.exists(model):
        return os.path.isdir(model)
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model)) and not model.endswith(".gguf")


def _packages():
    try:
        import torch
        import transformers
    except ImportError as e:
        what = f"a checkpoint is run by torch and transformers, of which {e.name} is missing"
        raise CheckpointError(f"{what}: pip install torch transformers") from None
    transformers.logging.set_verbosity_error()  # what it would say is checked below, or names no fault of the user
    transformers.logging.disable_progress_bar()
    return torch, transformers


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


class Checkpoint:
    """A model run by transformers, without its output matrix.

    `name` is a folder with config.json or a name of the hub, `served` the GGUF that it must be the same model as. `dtype` is
    one of DTYPES ("": f32 on a CPU, else bf16), `device` a device of torch ("": cpu).

    Raises CheckpointError naming expected and found when packages are missing, the checkpoint cannot be loaded, or it is
    another model.
    """

    def __init__(self, name: str, served: Model, dtype: str = "", device: str = "", threads: int = 2):
        self.name, self.device = name, device or "cpu"
        self.dtype = dtype or ("f32" if self.device == "cpu" else "bf16")
        if self.dtype not in DTYPES:
            raise CheckpointError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        self._torch, transformers = _packages()
        self._check_device()
        self._torch.set_num_threads(threads)
        config = self._loaded(transformers.AutoConfig)
        self._file = ModelFile(served.path)
        _check_config(name, config.get_text_config(), served, self._file)
        kind = getattr(self._torch, DTYPES[self.dtype])
        model, info = self._loaded(transformers.AutoModel, config=config, dtype=kind, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(f"{name}: expected weights for the whole model, found none for {', '.join(missing[:4])}")
        self._decoder = model.get_decoder().eval()
        self._check_weights()
        self._decoder.to(self.device)

    def _check_device(self) -> None:
        try:
            kind = self._torch.device(self.device).type
        except RuntimeError:
            kind = ""
        if kind not in ("cpu", "cuda"):
            raise CheckpointError(f"device: expected cpu or cuda, found {self.device!r}")
        n_gpus = self._torch.cuda.device_count()
        if kind == "cuda" and (self._torch.device(self.device).index or 0) >= n_gpus:
            version = self._torch.__version__
            raise CheckpointError(f"device: expected a GPU that torch {version} can use, found {n_gpus} and {self.device!r}")

    def _loaded(self, auto, **kw):
        if os.path.isdir(self.name) and not os.path.isfile(os.path.join(self.name, "config.json")):
            raise CheckpointError(f"expected a checkpoint with config.json, found none in {self.name}")
        # errors of a file that is not what it says come from many libraries, and have no base class of their own
        try:
            return auto.from_pretrained(self.name, trust_remote_code=False, **kw)
        except Exception as e:
            raise CheckpointError(f"{self.name} could not be loaded by transformers: {_first_line(e)}") from e

    #
    # the same model as the GGUF?
    #

    def _check_weights(self) -> None:
        """Compare the norms, which are never quantised, and the first rows of matrices, as far as their types allow."""
        self._check_norm("output_norm", self._decoder.norm.weight)
        for il, layer in enumerate(self._decoder.layers):
            parameters = dict(layer.named_parameters())
            for there, here in NORMS.items():
                self._check_norm(f"blk.{il}.{there}", parameters[here])
            # dense layers have some of the matrices, layers with experts have others
            there = {t: h for t, h in MATRICES.items() if f"blk.{il}.{t}.weight" in self._file.tensors and h in parameters}
            if not there:
                raise self._refusal(f"layer {il}: expected some of {', '.join(MATRICES)} in both, found none")
            for name, here in there.items():
                self._check_matrix(f"blk.{il}.{name}", parameters[here])

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.name} is not the model of the GGUF that the maps are for, perhaps a relative: {what}")

    def _check_norm(self, name: str, found) -> None:
        expected = self._torch.from_numpy(self._file.required(f"{name}.weight").copy()).to(found.dtype)
        if expected.shape != found.shape or not self._torch.equal(expected, found.detach()):
            raise self._refusal(f"{name} differs")

    def _check_matrix(self, name: str, found) -> None:
        stored = self._file.tensors[f"{name}.weight"]
        kind, shape = stored.tensor_type, tuple(int(n) for n in reversed(stored.shape))
        if shape != tuple(found.shape):
            raise self._refusal(f"{name}: expected {shape}, found {tuple(found.shape)}")
        rows = stored.data.reshape(-1, stored.data.shape[-1])[:ROWS]
        expected, scale = gguf.dequantize(rows, kind), self._file.tensor(f"{name}.scale")
        expected = expected if scale is None else expected * scale.flat[0]
        found = found.detach().reshape(-1, shape[-1])[:ROWS].float().numpy()
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        allowed = rounding(kind) + rounding(_GGML[self.dtype])
        if not error <= allowed:
            raise self._refusal(f"{name}: expected within {allowed:.2g} of its norm as {kind.name} allows, found {error:.2g}")

    def sha256(self) -> str:
        """Over the values of all parameters, in their dtype."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._decoder.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(self._torch.uint8).numpy())
        return digest.hexdigest()

    #
    # running
    #

    def activations(self, chunks: Iterable[Chunk], layers: list[int]) -> Iterator[dict[int, np.ndarray]]:
        """Inputs of `layers` for each chunk, float32 [n_tokens, n_embd]; row 0 is position 0. As capture.activations()."""
        inputs: dict[int, np.ndarray] = {}

        def keep(il: int):
            def hook(_layer, args, kwargs) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                inputs[il] = x[0].to("cpu", self._torch.float32, copy=True).numpy()

            return hook

        hooks = [self._decoder.layers[il].register_forward_pre_hook(keep(il), with_kwargs=True) for il in layers]
        try:
            for chunk in chunks:
                with self._torch.inference_mode():
                    self._decoder(input_ids=self._torch.tensor([chunk.tokens], device=self.device), use_cache=False)
                yield dict(inputs)
                inputs.clear()
        finally:
            for hook in hooks:
                hook.remove()


def _check_config(name: str, config, served: Model, file: ModelFile) -> None:
    """Raises CheckpointError when the hyper-parameters are not those of the GGUF."""
    arch = served.architecture
    types = MODEL_TYPES.get(arch, ())
    if config.model_type not in types:
        expected = " or ".join(types) or "none that is known"
        found = config.model_type
        raise CheckpointError(f"{name}: expected model type {expected} for a GGUF of architecture {arch}, found {found}")
    for what, expected, found in (
        ("layers", served.n_layer, config.num_hidden_layers),
        ("width", served.n_embd, config.hidden_size),
        ("tokens in the vocabulary", served.n_vocab, config.vocab_size),
        ("heads of queries", served.n_head, config.num_attention_heads),
        ("heads of keys and values", served.n_head_kv, config.num_key_value_heads),
        ("epsilon of the norms", file.get(f"{arch}.attention.layer_norm_rms_epsilon", 0.0), config.rms_norm_eps),
        ("base of the rotation", file.get(f"{arch}.rope.freq_base", 1e4), config.rope_parameters["rope_theta"]),
    ):
        if not np.isclose(expected, found, rtol=1e-6, atol=0):  # metadata are float32
            raise CheckpointError(f"{name}: expected {expected:.7g} {what} as in {served.path}, found {found:.7g}")


_GGML = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16}


def rounding(kind: gguf.GGMLQuantizationType) -> float:
    """How far a matrix of this type may be from the one that it was made of: norm of the difference over norm.

    With n bits a weight, beside the scales of its block, weights are rounded to one of 2^n steps through a block's range: the
    error found on SmolLM2 is at most 1.7 / 2^n, for types of 2 to 8 bits.
    """
    floats = {_GGML["f32"]: 1e-5, _GGML["f16"]: 2**-11, _GGML["bf16"]: 2**-8}
    if kind in floats:
        return floats[kind]
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    return 2.5 / 2 ** (math.ceil(8 * n_bytes / n_weights) - 1)  # the scales take at most a bit a weight
