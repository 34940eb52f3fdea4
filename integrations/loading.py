# SPDX-License-Identifier: Apache-2.0
"""Find a model by name and make text into inputs for it, for the command line and the demo.

A name is one of the built-in random configurations, a GGUF file, a folder, or a hub id, tried in
that order. Code that comes with a checkpoint is never run (``trust_remote_code`` stays off).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fusedops.environment import available_memory, one_line

__all__ = ["BUILT_IN", "SEED", "ByteTokenizer", "LoadedModel", "LoadingError", "load", "vocabulary"]

SEED = 0  # of random weights and drawn token ids, and of every run that is compared
_BYTES = 256

BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": (
        "llama",
        {
            "vocab_size": _BYTES,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        },
    ),
    "tiny-gpt2": (
        "gpt2",
        {"vocab_size": _BYTES, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048},
    ),
    "llama-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "rms_norm_eps": 1e-5,
        },
    ),
    "gpt2-small": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "gemma2-2b": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "pad_token_id": None,
        },
    ),
    "bert-base": ("bert", {"architectures": ["BertForMaskedLM"]}),
}
"""Random-weight configurations: name -> (transformers model type, configuration)."""

# Norm weights of exactly one and biases of zero would hide a norm that forgets to apply them.
_NORM_SPREAD = 0.2


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


class LoadingError(ValueError):
    """A model could not be had; the message is one line that says which and why."""


class ByteTokenizer:
    """UTF-8 bytes as token ids, for the built-in models.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.decode(tokenizer.encode("naïve"))
    'naïve'
    """

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token % _BYTES for token in token_ids).decode(errors="replace")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, where its weights come from, and its tokenizer (None: it has none)."""

    model: nn.Module
    source: str
    tokenizer: Tokenizer | None

    def prompt_length(self, prompt: str) -> int:
        """How many tokens ``prompt`` is; 0 without a tokenizer."""
        return 0 if self.tokenizer is None else len(self.tokenizer.encode(prompt))

    def inputs(self, prompt: str, *, batch: int = 1, tokens: int | None = None) -> dict[str, Any]:
        """``prompt`` as model inputs of shape (batch, tokens).

        The prompt is cut or repeated to fill ``tokens`` (default: its own length); each further
        sequence of the batch starts one token later, so that no two rows are alike. Without a
        tokenizer the ids are drawn with a fixed seed. Encoder-decoder models get the same ids on
        both sides. ValueError for an empty prompt, for sizes below one, and for more tokens than
        the model has positions.
        """
        for name, size in (("batch", batch), ("tokens", tokens)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.tokenizer is None:
            generator = torch.Generator().manual_seed(SEED)
            length = tokens or 64
            stream = torch.randint(
                0, vocabulary(self.model), (length + batch,), generator=generator
            ).tolist()
        else:
            stream = list(self.tokenizer.encode(prompt))
            if not stream:
                raise ValueError("prompt must hold at least one token, got an empty one")
            length = tokens or len(stream)
        config = getattr(self.model, "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and length > positions:
            raise ValueError(f"tokens must fit the model's {positions} positions, got {length}")
        rows = [
            [stream[(start + place) % len(stream)] for place in range(length)]
            for start in range(batch)
        ]
        device = next(self.model.parameters()).device
        ids = torch.tensor(rows, dtype=torch.long, device=device)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            made["decoder_input_ids"] = ids.clone()
        return made


def load(
    name: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load ``name`` in ``dtype`` onto ``device``, in eval mode.

    ``name`` is a key of ``BUILT_IN`` (made on the device directly, random norm weights
    included), the path of a GGUF file, a folder (``save_pretrained``'s, or one with a single
    GGUF file in it) or a hub id. ImportError where transformers is missing; LoadingError, always
    one line, for an unknown name, an unreadable file, and too little memory.

        >>> loaded = load("tiny-gpt2")
        >>> loaded.inputs("to be or not to be", batch=2)["input_ids"].shape
        torch.Size([2, 18])
    """
    import transformers  # optional: only the [hf] extra brings it

    del transformers
    name = os.fspath(name)
    device = torch.device(device)
    with _readable_errors(name, device):
        if device.type == "cuda" and not torch.cuda.is_available():
            raise LoadingError(f"device {device} is not usable here: torch sees no CUDA device")
        if name in BUILT_IN:
            model, tokenizer = _built_in(name, dtype, device), ByteTokenizer()
            return LoadedModel(model.eval(), f"{name} (built in, random weights)", tokenizer)
        folder, gguf_file = _locate(name)
        return _pretrained(name, folder, gguf_file, dtype, device)


def _built_in(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    model_type, settings = BUILT_IN[name]
    # Larger than the usual 0.02, under which logits lie too close together to tell anything.
    config = AutoConfig.for_model(
        model_type, initializer_range=0.08, bos_token_id=None, eos_token_id=None, **settings
    )
    masked = any("ForMaskedLM" in architecture for architecture in config.architectures or ())
    model_class: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class.from_config(config).parameters())
    _require_memory(name, count * dtype.itemsize, device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.default_generator.manual_seed(SEED)
        if devices:
            torch.cuda.manual_seed(SEED)
        model: nn.Module = model_class.from_config(config, dtype=dtype)
        _spread_vectors(model)
    return model


@torch.no_grad()
def _spread_vectors(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=_NORM_SPREAD)


def _locate(name: str) -> tuple[str, str | None]:
    """The folder or hub id that transformers is given, and the GGUF file in it."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise LoadingError(f"{name} is a file but no .gguf file; give a folder or a GGUF file")
        _check_gguf(path)
        return str(path.parent), path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), None
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            _check_gguf(found[0])
            return str(path), found[0].name
        if found:
            raise LoadingError(f"{name} holds {len(found)} GGUF files; give the path of one")
        raise LoadingError(f"{name} holds neither config.json nor a GGUF file")
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if looks_local or path.suffix.lower() == ".gguf":
        raise LoadingError(f"{name} does not exist")
    return name, None


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise LoadingError(f"{path} is no GGUF file: it starts with {magic!r}")


def _pretrained(
    name: str, folder: str, gguf_file: str | None, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    from transformers import AutoConfig

    options: dict[str, Any] = {"trust_remote_code": False}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
        # Quantised weights only grow when they are read: a lower bound, and free to know.
        _require_memory(name, (Path(folder) / gguf_file).stat().st_size, device)
        from transformers import AutoModelForCausalLM

        model_class: Any = AutoModelForCausalLM
    else:
        if not Path(folder).is_dir() and not _hub_answers(folder):
            options["local_files_only"] = True  # what is cached, without half a minute of retries
        config = AutoConfig.from_pretrained(folder, **options)
        model_class = _model_class(config)
        _require_memory(name, _weight_bytes(Path(folder), dtype, config), device)
    model = model_class.from_pretrained(folder, dtype=dtype, **options)
    model = model.to(device).eval()
    return LoadedModel(model, name, _tokenizer(folder, options))


def _hub_answers(name: str) -> bool:
    """Whether the hub can be reached; only a connection that fails at once says that it cannot."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:  # of httpx or of requests, as huggingface_hub's release has it
        kinds = {base.__name__ for base in type(error).__mro__}
        return kinds.isdisjoint({"ConnectError", "ConnectionError"}) or "Timeout" in kinds
    return True


def _model_class(config: Any) -> Any:
    """The class that wrote the checkpoint, if transformers has it, else its causal LM."""
    import transformers

    for architecture in config.architectures or ():
        found = getattr(transformers, architecture, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def _weight_bytes(folder: Path, dtype: torch.dtype, config: Any) -> int:
    """Bytes of a local checkpoint's weights in ``dtype``; 0 for one that is still on the hub."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    saved_dtype = getattr(config, "dtype", None) or dtype
    return stored * dtype.itemsize // saved_dtype.itemsize


def _tokenizer(folder: str, options: dict[str, Any]) -> Tokenizer | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
        return tokenizer
    except Exception:  # missing files surface as any of OSError, ValueError, TypeError, KeyError
        return None


def vocabulary(model: nn.Module) -> int:
    """How many token ids ``model`` knows; LoadingError where it embeds none."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, nn.Module) and isinstance(embedding.weight, Tensor):
        return embedding.weight.shape[0]
    raise LoadingError(f"{type(model).__name__} has no token embedding to feed text to")


def _require_memory(name: str, needed: int, device: torch.device) -> None:
    available = available_memory(device)
    if available is not None and needed > available:
        raise LoadingError(
            f"not enough memory on {device} for {name}: its weights need "
            f"{needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"
        )


@contextmanager
def _readable_errors(name: str, device: torch.device) -> Iterator[None]:
    """Any failure to load, of whatever type transformers lets out, as one LoadingError line."""
    try:
        yield
    except (LoadingError, KeyboardInterrupt):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise LoadingError(f"not enough memory on {device} for {name}") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and "not enough memory" in str(error):
            raise LoadingError(f"not enough memory on {device} for {name}") from error
        unknown = "/" not in name and not Path(name).expanduser().exists()
        hint = f" (built in: {', '.join(BUILT_IN)})" if unknown else ""
        raise LoadingError(
            f"cannot load {name}: {type(error).__name__}: {one_line(error)}{hint}"
        ) from error
