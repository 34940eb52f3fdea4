# SPDX-License-Identifier: Apache-2.0
"""Models by name, from every source that needs no network, and each way in which that fails."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedops.integrations import loading
from fusedops.integrations.loading import BUILT_IN, ByteTokenizer, LoadedModel, LoadingError, load


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    load("tiny-llama").model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_tiny_models_hide_nothing(name: str) -> None:
    first, second = load(name), load(name)
    vectors = {n: p for n, p in first.model.named_parameters() if p.dim() == 1}
    assert vectors
    for parameter in vectors.values():
        assert parameter.std() > 0.05
    for (_, a), (_, b) in zip(
        first.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b)
    assert not first.model.training
    assert "random weights" in first.source


def test_built_in_takes_dtype_and_keeps_the_random_state() -> None:
    state = torch.get_rng_state()
    model = load("tiny-gpt2", torch.bfloat16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32


def test_mid_sized_configurations_are_what_their_names_say() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    expected = {
        "llama-1b": 1.24e9, "llama-8b": 8.03e9, "gpt2-small": 1.24e8, "gpt2-xl": 1.56e9,
        "qwen3-0.6b": 0.596e9, "gemma2-2b": 2.61e9,
    }  # fmt: skip
    for name, count in expected.items():
        model_type, settings = BUILT_IN[name]
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type, **settings)
            model = AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=0.01)


def test_an_encoder_is_built_with_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings = BUILT_IN["bert-base"]
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(BUILT_IN, "bert-base", (kind, {**settings, **small, "vocab_size": 256}))
    model = load("bert-base").model
    assert type(model).__name__ == "BertForMaskedLM"
    assert model.bert.embeddings.LayerNorm.weight.std() > 0.1


def test_folder_gives_the_weights_that_were_saved(saved: Path) -> None:
    loaded = load(saved)
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert loaded.tokenizer is None
    assert not loaded.model.training
    expected = load("tiny-llama").model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name])
    ids = loaded.inputs("anything", batch=2, tokens=9)["input_ids"]
    assert ids.shape == (2, 9)
    assert torch.equal(ids, loaded.inputs("another thing", batch=2, tokens=9)["input_ids"])
    assert ids.max() < 256


def test_class_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert type(load(tmp_path).model).__name__ == "BertForMaskedLM"


def test_gguf_file_and_folder(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    hidden, rows = 32, 48
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 2),
        (writer.add_vocab_size, rows),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_dimension_count, 16),
    ):
        add(value)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "token_embd.weight": (rows, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (rows, hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (64, hidden),
        "blk.0.ffn_up.weight": (64, hidden),
        "blk.0.ffn_down.weight": (hidden, 64),
        **{f"blk.0.attn_{n}.weight": (hidden, hidden) for n in ("q", "k", "v", "output")},
    }
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in (tmp_path / "tiny.gguf", tmp_path):
        loaded = load(name)
        assert type(loaded.model).__name__ == "LlamaForCausalLM"
        norm = loaded.model.get_parameter("model.norm.weight")
        assert torch.equal(norm, tensors["output_norm.weight"])
        assert loaded.model(**loaded.inputs("", tokens=8)).logits.shape == (1, 8, rows)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadingError, match="holds 2 GGUF files"):
        load(tmp_path)


def test_example_trains_a_model_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(loading.__file__).resolve().parent.parent / "examples" / "char_gpt2.py"
    if not script.is_file():
        pytest.skip("the examples are not beside this installation")
    example = runpy.run_path(str(script))
    folder = tmp_path / "cache" / "char-gpt2"
    assert example["main"]([str(folder), "--steps", "2"]) == 0
    assert "trained on" in capsys.readouterr().out
    loaded = load(folder)
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"
    assert loaded.tokenizer is not None
    text = "The name of a class,\n    and its __doc__."
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    assert loaded.prompt_length(text) == len(text)

    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert example["main"]([str(folder)]) == 0  # kept, not trained anew
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == written
    assert example["main"]([str(tmp_path)]) == 1
    assert "holds something else" in capsys.readouterr().err


def test_prompt_is_cut_repeated_and_shifted() -> None:
    loaded = load("tiny-gpt2")
    made = loaded.inputs("abcd", batch=3, tokens=6)
    text = [bytes(row).decode() for row in made["input_ids"].tolist()]
    assert text == ["abcdab", "bcdabc", "cdabcd"]
    assert made["attention_mask"].shape == (3, 6)
    assert made["attention_mask"].all()
    assert loaded.inputs("abcd")["input_ids"].shape == (1, 4)
    assert loaded.inputs("abcd", tokens=2)["input_ids"].tolist() == [[97, 98]]
    assert loaded.prompt_length("abcd") == 4


def test_encoder_decoder_gets_both_sides() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=256, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    loaded = LoadedModel(T5ForConditionalGeneration(config), "t5", ByteTokenizer())
    made = loaded.inputs("abcd")
    assert torch.equal(made["decoder_input_ids"], made["input_ids"])


def test_bad_sizes_are_named() -> None:
    loaded = load("tiny-gpt2")
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        loaded.inputs("a", batch=0)
    with pytest.raises(ValueError, match="tokens must be at least 1, got -3"):
        loaded.inputs("a", tokens=-3)
    with pytest.raises(ValueError, match="2048 positions, got 2049"):
        loaded.inputs("a", tokens=2049)
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        loaded.inputs("")


def _write(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _broken_folder(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: "no-such-model-anywhere", "cannot load no-such-model-anywhere"),
        (lambda folder: "nobody/no-such-model", "cannot load nobody/no-such-model"),
        (lambda folder: folder / "absent", "does not exist"),
        (lambda folder: "absent.gguf", "does not exist"),
        (lambda folder: folder, "holds neither config.json nor a GGUF file"),
        (_write("weights.bin", b"x"), "is a file but no .gguf file"),
        (_write("weights.gguf", b"not it"), "is no GGUF file"),
        (_write("weights.gguf", b"GGUF"), "cannot load"),
        (lambda folder: _broken_folder(folder, config_json=b"{"), "cannot load"),
        (lambda folder: _broken_folder(folder, config_json=b"{}"), "cannot load"),
        (
            lambda folder: _broken_folder(folder, config_json=b'{"model_type": "novel"}'),
            "cannot load",
        ),
        (
            lambda folder: _broken_folder(folder, config_json=b'{"model_type": "gpt2"}'),
            "cannot load",
        ),
    ],
)
def test_every_failure_is_one_line(
    make: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadingError) as caught:
        load(make(tmp_path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_unknown_names_are_told_what_is_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadingError, match=r"built in: tiny-llama, "):
        load("no-such-model-anywhere")
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("broken.gguf").write_bytes(b"GGUF")
    for name in ("broken", "broken.gguf"):
        with pytest.raises(LoadingError) as caught:
            load(name)
        assert "built in" not in str(caught.value)


class ConnectError(Exception):
    """As httpx calls it."""


class Timeout(Exception):
    """As requests calls it."""


class ConnectTimeout(ConnectionError, Timeout):
    """As requests calls it; a slow network is no missing one."""


@pytest.mark.parametrize(
    ("error", "local"),
    [
        (ConnectError("no route"), True),
        (ConnectionError("offline"), True),
        (ConnectTimeout("slow"), False),
        (ValueError("404"), False),
        (None, False),
    ],
)
def test_hub_that_cannot_be_reached_is_asked_once(
    error: Exception | None, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    import transformers

    asked: list[str] = []
    seen: list[bool] = []

    def answer(url: str) -> None:
        asked.append(url)
        if error is not None:
            raise error

    def stop(folder: str, **options: Any) -> None:
        seen.append(options.get("local_files_only", False))
        raise OSError("enough")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", stop)
    with pytest.raises(LoadingError, match="enough"):
        load("nobody/no-such-model")
    assert len(asked) == 1
    assert seen == [local]


def test_truncated_weights_are_one_line(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        content = file.read_bytes()
        keep = len(content) // 2 if file.suffix == ".safetensors" else None
        (tmp_path / file.name).write_bytes(content[:keep])
    with pytest.raises(LoadingError, match="cannot load"):
        load(tmp_path)


def test_code_of_a_checkpoint_is_not_run(saved: Path, tmp_path: Path) -> None:
    import json

    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    with pytest.raises(LoadingError, match="cannot load"):
        load(tmp_path)


def test_want_of_memory_is_told_before_it_is_taken(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda device: 10_000)
    for name in ("llama-8b", "tiny-llama", saved):
        with pytest.raises(LoadingError, match=r"not enough memory on cpu for .* GiB"):
            load(name)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
    ],
)
def test_memory_that_runs_out_is_one_line(
    error: Exception, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: nn.Module, *args: Any) -> nn.Module:
        raise error

    monkeypatch.setattr(nn.Module, "to", fail)
    with pytest.raises(LoadingError, match=f"not enough memory on cpu for {saved}"):
        load(saved)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_device_that_is_not_there() -> None:
    with pytest.raises(LoadingError, match="device cuda is not usable here"):
        load("tiny-llama", device="cuda")
