# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family that transformers can build, and the table of what fuses in them.

    python docs/families.py            writes docs/families.md
    python docs/families.py llama t5   prints these rows only

No family is named here. A configuration is the family's default with every attribute that sets a
size made small, wherever it stands; a family whose default needs more than that is not covered.
"""

import argparse
import inspect
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

MAX_PARAMETERS = 4_000_000
LAYERS = 2
VOCABULARY = 128

TASKS = {
    "causal LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision or audio": "MODEL_MAPPING_NAMES",
}

# Attributes that set a size, in whatever family, and the size that they are given.
_SIZE_TABLE = """
  32 hidden_size d_model n_embd dim embedding_size embed_dim word_embed_proj_dim hidden_dim
  32 decoder_hidden_size encoder_hidden_size projection_dim d_embed
  32 hidden_size_per_layer_input cross_attention_hidden_size emb_dim attention_hidden_size
  32 model_dim lru_width linear_hidden_size
   2 num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers
   2 num_decoder_layers num_encoder_layers decoder_num_hidden_layers
   2 encoder_num_hidden_layers
   4 num_attention_heads n_head n_heads num_heads encoder_attention_heads
   4 decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads
   4 linear_num_key_heads linear_num_value_heads
   2 num_key_value_heads n_head_kv num_kv_heads multi_query_group_num n_kv_heads
   2 decoder_num_key_value_heads encoder_num_key_value_heads
   8 head_dim d_kv attention_head_size kv_channels v_head_dim qk_nope_head_dim
   8 qk_rope_head_dim qk_head_dim linear_key_head_dim linear_value_head_dim d_head
   8 global_head_dim swa_head_dim linear_head_dim
  64 intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim dim_feedforward
  64 ffn_hidden_size mlp_dim hidden_features intermediate_dim intermediate_size_mlp
  64 decoder_intermediate_size encoder_intermediate_size ff_dim dense_intermediate_size
  16 moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
  16 shared_intermediate_size moe_hidden_size q_lora_rank kv_lora_rank expert_hidden_size
  16 moe_shared_expert_intermediate_size index_head_dim
   4 num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts
   4 zero_expert_num
   2 num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts moe_top_k
   1 n_group topk_group n_groups num_expert_group
   1 n_shared_experts num_shared_experts moe_num_shared_experts
 128 vocab_size vocab_size_per_layer_input text_vocab_size
 128 max_position_embeddings n_positions max_source_positions max_target_positions
 128 max_seq_len seq_length max_sequence_length block_size
   8 mamba_d_state state_size ssm_state_size
   8 mamba_n_heads mamba_num_heads
   8 mamba_d_head mamba_head_dim
  32 image_size
   8 patch_size
   2 depth
   1 first_k_dense_replace
   0 num_nextn_predict_layers
"""
SIZES = {
    name: int(line.split()[0])
    for line in _SIZE_TABLE.strip().splitlines()
    for name in line.split()[1:]
}

# Changes to SIZES for families in which sizes hang together in another way.
VARIANTS: tuple[dict[str, int], ...] = (
    {},
    {name: 4 for name, size in SIZES.items() if size == 2 and "head" in name or "kv" in name},
    {name: 64 for name, size in SIZES.items() if size == 32 and name not in ("image_size",)},
    {name: 16 for name, size in SIZES.items() if size == 8 and "dim" in name},
)


def tiny_config(config_class: type[PretrainedConfig], variant: dict[str, int]) -> PretrainedConfig:
    """The default configuration with everything small that sets a size, also in parts of it."""
    return config_class(**_small(config_class(), {**SIZES, **variant}))


def _small(default: PretrainedConfig, sizes: dict[str, int]) -> dict[str, Any]:
    values = {**vars(default)}
    for name in default.attribute_map:
        values.setdefault(name, getattr(default, name, None))
    layers = max(
        (v for k, v in values.items() if SIZES.get(k) == LAYERS and "layer" in k and _is_int(v)),
        default=None,
    )
    accepted = set(inspect.signature(type(default).__init__).parameters) | set(
        getattr(type(default), "__annotations__", {})
    )
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            small[name] = type(value)(**_small(value, sizes))
        elif name in sizes and _is_int(value):
            small[name] = min(value, sizes[name])
        elif name == "image_size" and isinstance(value, list | tuple):
            small[name] = type(value)(min(side, sizes[name]) for side in value)
        elif name.endswith("_token_id") and _is_int(value):
            small[name] = value % VOCABULARY
        elif isinstance(value, list) and layers and len(value) == layers:
            small[name] = value[:LAYERS]
        elif isinstance(value, float) and "dropout" in name or name.endswith("_drop"):
            small[name] = 0.0
    return {name: value for name, value in small.items() if name in accepted or name in values}


def _is_int(value: object) -> bool:
    return type(value) is int


@dataclass(frozen=True)
class Family:
    """One entry of transformers' own tables of models."""

    model_type: str
    task: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.model_type}-{self.task.replace(' ', '_')}"

    def build(self) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        """A tiny model with random norm weights, and inputs that it runs on.

        Raises RuntimeError with the last error where none of the variants does.
        """
        error: Exception | None = None
        for variant in VARIANTS:
            try:
                model = self._build(variant)
                inputs = make_inputs(model)
                run(model, inputs)
                return model, inputs
            except Exception as failure:
                error = error or failure
        raise RuntimeError(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")

    def _build(self, variant: dict[str, int]) -> PreTrainedModel:
        config_class = configuration_auto.CONFIG_MAPPING[self.model_type]
        config = tiny_config(config_class, variant)
        model_class = getattr(transformers, self.class_name)
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(config).parameters())
        if count > MAX_PARAMETERS:
            raise ValueError(f"{count} parameters, more than {MAX_PARAMETERS}")
        torch.manual_seed(5)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.isfinite().all():
                    parameter.zero_()
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model


def families() -> list[Family]:
    """Every family once, as the first of `TASKS` that it has a class for."""
    found: dict[str, Family] = {}
    for task, table in TASKS.items():
        for model_type, name in getattr(modeling_auto, table, {}).items():
            class_name = name if isinstance(name, str) else name[0]
            if model_type in configuration_auto.CONFIG_MAPPING_NAMES:
                found.setdefault(model_type, Family(model_type, task, class_name))
    return sorted(found.values(), key=lambda family: (list(TASKS).index(family.task), str(family)))


def make_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Random inputs of the kind that the model's forward takes."""
    generator = torch.Generator().manual_seed(7)
    config = model.config
    parameters = inspect.signature(model.forward).parameters
    ids = torch.randint(3, VOCABULARY - 8, (2, 9), generator=generator)
    inputs: dict[str, Tensor] = {}
    main = model.main_input_name
    if main in ("input_ids", "decoder_input_ids") or "input_ids" in parameters:
        inputs["input_ids"] = ids
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = ids[:, :5]
    if main in ("pixel_values", "pixel_values_videos"):
        size = getattr(config, "image_size", 32)
        size = tuple(size) if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        shape = (2, channels, *size) if main == "pixel_values" else (1, 2, channels, *size)
        inputs[main] = torch.randn(shape, generator=generator)
    if main in ("input_values",):
        inputs[main] = torch.randn(1, 4000, generator=generator)
    if main in ("input_features",):
        bins = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", 64)
        inputs[main] = torch.randn(1, bins, frames, generator=generator)
        inputs.pop("input_ids", None)
    return inputs


@torch.no_grad()
def run(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All floating point tensors of one forward's output."""
    torch.manual_seed(9)  # for forwards that draw numbers
    options = (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )
    output = model(**inputs, **options)
    found = [value for value in _tensors(output.to_tuple()) if value.is_floating_point()]
    if not found:
        raise ValueError("no floating point tensor comes out")
    return found


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all values are the same bits, or NaN in both."""
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())
        for x, y in zip(a, b, strict=True)
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of transformers about what a tiny random model lacks."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- the table ---------------------------------------------------------------------------------

TABLE = Path(__file__).with_suffix(".md")
SECONDS = 60  # for one family

HEADER = """# What fuses in which family

Made by `python docs/families.py` with transformers {transformers}, torch {torch}: a tiny random
model of each family, run three times, the operators forced through their reference on a CPU. Of
{built} families that could be built, {equal} gave, bit for bit, what the same model gives with its
norms alone patched, and {fusing} fuse adds.

*norms* counts the norm calls of one forward that run an operator, *inside* and *across* those of
them that also do a residual add (within a block, or for the norm after it), *plain* the adds to the
stream that stay by themselves. Two layers each, so the last block's share is larger than in life.

| family | task | norms | inside | across | plain | why nothing fuses |
|---|---|---|---|---|---|---|
"""

REASONS = {
    "no norm reads a sum that it makes": "no norm reads a sum",
    "something else than a norm read the sum": "other code reads the sum",
    "another add came before a norm read the sum": "several adds in a row",
    "the block did not return the sum": "the sum stays in the block",
    "the rows do not lie one after the other in memory": "rows not contiguous",
}


@dataclass
class Row:
    """What one family did in its third forward."""

    family: Family
    norms: int
    inside: int
    across: int
    plain: int
    why: str
    equal: bool

    def __str__(self) -> str:
        numbers = f"{self.norms} | {self.inside} | {self.across} | {self.plain}"
        return f"| {self.family.model_type} | {self.family.task} | {numbers} | {self.why} |"


def measure(family: Family, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Row:
    """Count what fuses in a built family, and compare with its norms alone patched."""
    from fusedops import dispatch
    from fusedops.integrations import patch, patched, unpatch
    from fusedops.integrations.patching import force_operators

    same = True
    with force_operators():
        try:
            with patched(model, fuse_residual=False):
                expected = run(model, inputs)
        except ValueError as error:
            return Row(family, 0, 0, 0, 0, _shorten(str(error).partition("; ")[2]), True)
        report = patch(model)
        before: Counter[str] = Counter()
        for _ in range(3):
            with dispatch.count_calls() as calls:
                same = equal(run(model, inputs), expected) and same
            after = _totals(report)
            delta, before = after - before, after
        unpatch(model)
    why = ""
    if delta["inside"] + delta["across"] == 0:
        why = "; ".join(
            f"{row.block_class}: {_shorten(row.why)}" for row in report.fused if row.why
        )
        why = why or "its norms stand in no repeated block"
    return Row(
        family,
        sum(calls.values()),
        delta["inside"],
        delta["across"] - delta["missed"],
        delta["plain"],
        why,
        same,
    )


def committed() -> tuple[str, dict[str, str]]:
    """What the table says: the version of transformers, and each family's row."""
    text = TABLE.read_text()
    (version,) = re.findall(r"with transformers (\S+),", text)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return version, {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def _totals(report: Any) -> Counter[str]:
    totals: Counter[str] = Counter()
    for row in report.fused:
        for name in ("inside", "across", "plain", "missed"):
            totals[name] += getattr(row, name)
    return totals


def _shorten(text: str) -> str:
    for long, short in REASONS.items():
        text = text.replace(long, short)
    return text.replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    wanted = set(parser.parse_args().families)
    rows: list[Row] = []
    signal.signal(signal.SIGALRM, _too_slow)
    with quiet():
        for family in families():
            if wanted and family.model_type not in wanted:
                continue
            signal.alarm(SECONDS)
            try:
                rows.append(measure(family, *family.build()))
            except Exception as error:
                print(f"{family}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            finally:
                signal.alarm(0)
            print(rows[-1], "" if rows[-1].equal else "NOT EQUAL", flush=True)
    if wanted:
        return
    header = HEADER.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        built=len(rows),
        equal=sum(row.equal for row in rows),
        fusing=sum(row.inside + row.across > 0 for row in rows),
    )
    TABLE.write_text(header + "".join(f"{row}\n" for row in rows))
    print(f"{len(rows)} families written to {TABLE}")


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "0")
    sys.path.insert(0, str(Path(__file__).parent.parent))
    torch.set_num_threads(1)
    main()
