# SPDX-License-Identifier: Apache-2.0
"""Patched models inside what users wrap around models, and their copies in files and processes.

Adapters, quantised linears, training loops, another tool's kernels, checkpoints, child processes.
The operators are forced, so that streams and operators really run on the CPU.
"""

import multiprocessing
import pickle
import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils import is_kernels_available

from fusedops import dispatch
from fusedops.integrations import patch, stream, unpatch
from fusedops.integrations.kernel_layers import FusedNorm, kernel_mapping
from fusedops.integrations.patching import force_operators, is_patched

IDS = torch.tensor([[5, 9, 33, 2, 17, 60, 8], [1, 44, 7, 12, 3, 3, 29]])
NORMS = 7  # of the model below, six of which follow an add


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patched norms call the operators on the CPU, which run their reference."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with force_operators():
        yield


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def counts(function: Callable[..., Any], *args: Any) -> tuple[Any, tuple[int, int]]:
    """(result, (norms called by themselves, norms fused with an add))."""
    with dispatch.count_calls() as calls:
        result = function(*args)
    fused = sum(count for (name, _), count in calls.items() if name.startswith("add_"))
    return result, (sum(calls.values()) - fused, fused)


def settled(function: Callable[..., Any], *args: Any) -> tuple[Any, tuple[int, int]]:
    """The same of the third call: by then it is known which norm follows which block."""
    for _ in range(2):
        function(*args)
    return counts(function, *args)


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-3), name


in_either_order = pytest.mark.parametrize("patch_first", [True, False], ids=["before", "after"])


# --- adapters ----------------------------------------------------------------------------------

of_peft = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def with_lora(model: nn.Module, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    return get_peft_model(model, config)


@of_peft
@in_either_order
def test_lora_trains_is_switched_off_and_merged(patch_first: bool) -> None:
    plain = with_lora(build_llama())
    expected, expected_gradients = logits(plain), gradients(plain)
    with plain.disable_adapter():
        expected_off = logits(plain)
    assert not torch.allclose(expected, expected_off, atol=1e-3)

    base = build_llama()
    if patch_first:
        patch(base)
    model = with_lora(base)
    if not patch_first:
        assert patch(model).patched == NORMS
    found, calls = settled(gradients, model)
    assert_gradients(found, expected_gradients)
    assert calls == (1, NORMS - 1)
    with model.disable_adapter():
        assert torch.allclose(logits(model), expected_off, atol=1e-5)
    model.merge_adapter()
    assert torch.allclose(logits(model), expected, atol=1e-5)
    model.unmerge_adapter()
    assert torch.allclose(logits(model), expected, atol=1e-5)

    merged = model.merge_and_unload()
    assert type(merged) is LlamaForCausalLM
    found, calls = settled(logits, merged)
    assert torch.allclose(found, expected, atol=1e-5)
    assert calls == (1, NORMS - 1)
    assert unpatch(merged) == NORMS
    found, calls = counts(logits, merged)
    assert torch.allclose(found, expected, atol=1e-5) and calls == (0, 0)
    names = [type(module) for module in merged.modules()]
    assert names == [type(module) for module in build_llama().modules()]


@of_peft
@in_either_order
def test_adapters_change_between_calls(patch_first: bool) -> None:
    from peft import LoraConfig

    def wrap(model: nn.Module) -> Any:
        model = with_lora(model)
        torch.manual_seed(5)
        model.add_adapter("second", LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
        return model

    plain = wrap(build_llama())
    expected = {}
    for name in ("default", "second"):
        plain.set_adapter(name)
        expected[name] = logits(plain)
    base = build_llama()
    if patch_first:
        patch(base)
    model = wrap(base)
    if not patch_first:
        patch(model)
    for name in ("default", "second", "default", "second"):
        model.set_adapter(name)
        assert torch.allclose(logits(model), expected[name], atol=1e-5)
    model.delete_adapter("default")
    assert torch.allclose(logits(model), expected["second"], atol=1e-5)
    assert type(model.unload()) is LlamaForCausalLM


@of_peft
@in_either_order
def test_trained_norms_of_modules_to_save(patch_first: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    def wrap(model: nn.Module) -> Any:
        model = with_lora(model, modules_to_save=["input_layernorm"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        return model

    plain = wrap(build_llama())
    expected, expected_gradients = logits(plain), gradients(plain)
    base = build_llama()
    if patch_first:
        patch(base)
    model = wrap(base)
    patch(model)
    found, calls = settled(gradients, model)
    assert_gradients(found, expected_gradients)
    assert any("modules_to_save" in name for name in found)
    assert sum(calls) == NORMS

    model.save_pretrained(tmp_path / "patched")
    plain.save_pretrained(tmp_path / "plain")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("patched", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = PeftModel.from_pretrained(build_llama(), tmp_path / "patched")
    assert torch.equal(logits(again), expected)
    patch(again)
    assert torch.allclose(logits(again), expected, atol=1e-5)

    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    unpatch(merged)
    assert torch.allclose(logits(merged), expected, atol=1e-5)


# --- quantised linears -------------------------------------------------------------------------


class Packed(nn.Parameter):
    """An integer weight of a class of its own, as 4-bit weights are kept."""


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale.to(x.dtype)).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return grads[0] @ (weight.to(grads[0].dtype) * scale.to(grads[0].dtype)), None, None


class Int8Linear(nn.Linear):
    """int8 weights with a scale a row, multiplied in an autograd.Function, as bitsandbytes does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = Packed(packed, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return _Multiply.apply(x, self.weight, self.scale)


def quantise(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, Int8Linear(child))
    return model


@in_either_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_linears(patch_first: bool, dtype: torch.dtype) -> None:
    plain = quantise(build_llama().to(dtype))
    expected, expected_gradients = logits(plain), gradients(plain)
    model = build_llama().to(dtype)
    if patch_first:
        patch(model)
        logits(model)
    quantise(model)
    assert patch(model).patched == NORMS
    found, calls = settled(gradients, model)
    assert calls == (1, NORMS - 1)
    if dtype is torch.float32:
        assert_gradients(found, expected_gradients)
    else:  # what the norms give differs where a sum of squares rounds to another bf16
        assert torch.allclose(logits(model), expected, atol=0.05 * expected.abs().max().item())
    assert unpatch(model) == NORMS
    assert torch.equal(logits(model), expected)


# --- training loops ----------------------------------------------------------------------------


def trained(model: nn.Module, folder: Path, **options: Any) -> tuple[list[float], nn.Module]:
    """Losses of three steps of transformers' Trainer, and the model."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=7,
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(6, 1)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "gradient_accumulation_steps": 2,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
    ],
    ids=["plain", "checkpointed"],
)
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    expected, reference = trained(build_llama(), tmp_path / "plain", **options)
    model = build_llama()
    patch(model)
    (found, _), calls = counts(lambda: trained(model, tmp_path / "patched", **options))
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == 3
    assert calls[1] >= 3 * (NORMS - 2)
    checkpoint = tmp_path / "patched" / "checkpoint-3"
    again = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    model.eval()
    assert again.state_dict().keys() == reference.state_dict().keys()
    unpatch(model)
    assert torch.equal(logits(again), logits(model))
    assert torch.allclose(logits(again), logits(reference.eval()), atol=1e-2)


@of_peft
def test_loop_that_generates_compares_and_learns() -> None:
    """A preference step: sample, score without the adapter, score with it, learn."""

    def steps(patch_it: bool) -> tuple[list[float], list[Tensor]]:
        model = with_lora(build_llama())
        if patch_it:
            patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, samples = [], []
        for _ in range(3):
            model.eval()
            ids = model.generate(
                input_ids=IDS,
                attention_mask=torch.ones_like(IDS),
                max_new_tokens=3,
                do_sample=False,
            )
            with torch.no_grad(), model.disable_adapter():
                reference = model(input_ids=ids).logits.log_softmax(-1)
            model.train()
            scores = model(input_ids=ids).logits.log_softmax(-1)
            ratio = (scores - reference).gather(-1, ids[..., None]).mean((1, 2))
            loss = -nn.functional.logsigmoid(ratio[0] - ratio[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            samples.append(ids)
        return losses, samples

    expected, expected_samples = steps(False)
    (found, samples), calls = counts(steps, True)
    assert found == pytest.approx(expected, rel=1e-4)
    assert all(map(torch.equal, samples, expected_samples))
    assert calls[1] > calls[0]


# --- kernels of another tool -------------------------------------------------------------------


class OtherNorm(nn.Module):
    """A layer that replaces the forward of modules with a weight and a variance_epsilon."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        OTHER.append(self)
        shape = (hidden_states.shape[-1],)
        return nn.functional.rms_norm(hidden_states, shape, self.weight, self.variance_epsilon)


OTHER: list[nn.Module] = []  # the modules whose replaced forward ran; a layer may have no state


def replace_forwards(model: nn.Module, layer: type[nn.Module] | None) -> None:
    """What `kernels.kernelize` does to the norms; None: it found no kernel for them."""
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            forward: Any = (layer or type(module)).forward
            module.forward = types.MethodType(forward, module)


@in_either_order
def test_forwards_that_were_replaced_keep_running(patch_first: bool) -> None:
    model = build_llama()
    expected = logits(model)
    if patch_first:
        patch(model)
        logits(model)
        logits(model)
    replace_forwards(model, OtherNorm)
    if not patch_first:
        with pytest.raises(ValueError, match="has a forward of its own in the instance"):
            patch(model)
    for _ in range(3):
        OTHER.clear()
        found, calls = counts(logits, model)
        assert torch.allclose(found, expected, atol=1e-5)
        assert len(OTHER) == NORMS and calls == (0, 0)
    unpatch(model)
    OTHER.clear()
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert len(OTHER) == NORMS


@in_either_order
def test_forwards_that_were_replaced_by_their_own(patch_first: bool) -> None:
    model = build_llama()
    expected = logits(model)
    if patch_first:
        patch(model)
    replace_forwards(model, None)
    if not patch_first:
        assert patch(model).patched == NORMS
    found, calls = settled(logits, model)
    assert torch.allclose(found, expected, atol=1e-5)
    assert sum(calls) == NORMS
    assert unpatch(model) == NORMS
    found, calls = counts(logits, model)
    assert torch.equal(found, expected) and calls == (0, 0)


def test_layer_for_kernels_patches_and_steps_aside() -> None:
    model = build_llama()
    expected, expected_gradients = logits(model), gradients(model)
    before = [dict(vars(module)) for module in model.modules()]
    replace_forwards(model, FusedNorm)
    for _ in range(3):
        found, calls = counts(gradients, model)
        assert_gradients(found, expected_gradients)
        assert calls == (NORMS, 0)
    assert "forward" not in vars(model.model.norm)
    replace_forwards(model, FusedNorm)  # kernelize does so again when training begins or ends
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert unpatch(model) == NORMS
    model.zero_grad()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert torch.equal(logits(model), expected)


def test_layer_for_kernels_leaves_other_norms_their_own_code() -> None:
    class Other(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.weight * hidden_states / hidden_states.abs().amax(-1, keepdim=True)

    norm, x = Other(16), torch.randn(3, 16)
    expected = norm(x)
    replace_forwards(norm, FusedNorm)
    for _ in range(2):
        found, calls = counts(norm, x)
        assert torch.equal(found, expected) and calls == (0, 0)
    assert type(norm) is Other and "forward" not in vars(norm)


def test_layer_for_kernels_under_hooks_and_the_compiler() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = build_llama()
    expected = logits(model)
    replace_forwards(model, FusedNorm)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, calls = counts(logits, compiled)
    assert torch.allclose(found, expected, atol=1e-5) and calls == (0, 0)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            add_hook_to_module(module, ModelHook())
    for _ in range(2):
        found, calls = counts(logits, model)
        assert torch.allclose(found, expected, atol=1e-5)
        assert calls == (NORMS, 0)
    assert unpatch(model) == NORMS
    found, calls = counts(logits, model)
    assert torch.equal(found, expected) and calls == (0, 0)


@in_either_order
def test_kernelize_with_the_local_mapping(
    patch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("kernels", reason="needs Hugging Face's kernels")
    if not hasattr(kernels, "kernelize"):
        pytest.skip("needs Hugging Face's kernels: what is found is a folder of that name")
    monkeypatch.setattr(socket.socket, "connect", None)  # no hub access
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    model = build_llama()
    expected = logits(model)
    if patch_first:
        patch(model)
        logits(model)
    for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE):
        with kernels.use_kernel_mapping(kernel_mapping(["cpu"]), inherit_mapping=False):
            kernels.kernelize(model, mode=mode, device="cpu")
        assert "forward" in vars(model.model.norm)
        for _ in range(3):
            found, calls = counts(logits, model)
            assert torch.allclose(found, expected, atol=1e-5)
            assert sum(calls) == NORMS
    patch(model)
    found, calls = settled(logits, model)
    assert torch.allclose(found, expected, atol=1e-5)
    assert calls == (1, NORMS - 1)
    assert unpatch(model) == NORMS
    assert torch.equal(logits(model), expected)


@in_either_order
def test_transformers_use_kernels(patch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_kernels_available():
        pytest.skip("needs the kernels package that this transformers asks for")
    monkeypatch.setattr(socket.socket, "connect", None)  # no hub access, and no layer for a CPU
    model = build_llama()
    expected = logits(model)
    if patch_first:
        patch(model)
    model.set_use_kernels(True)
    assert "forward" in vars(model.model.norm)
    assert patch(model).patched == NORMS
    for training in (False, True):  # which replaces the forwards once more
        model.train(training)
        found, calls = settled(logits, model)
        assert torch.allclose(found, expected, atol=1e-5)
        assert sum(calls) == NORMS
    assert unpatch(model) == NORMS
    found, calls = counts(logits, model)
    assert torch.equal(found, expected) and calls == (0, 0)


# --- checkpoints -------------------------------------------------------------------------------


def test_checkpoint_of_a_patched_model_is_the_unpatched_models(tmp_path: Path) -> None:
    model = build_llama()
    expected, keys = logits(model), list(model.state_dict())
    model.save_pretrained(tmp_path / "plain")
    patch(model)
    patched_logits, calls = settled(logits, model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path / "patched")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in files:
        one, other = (tmp_path / folder / name for folder in ("plain", "patched"))
        assert one.read_bytes() == other.read_bytes(), name
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(logits(loaded), expected)
    patch(loaded)
    again, calls_again = settled(logits, loaded)
    assert torch.equal(again, patched_logits) and calls_again == calls


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_are_exchangeable(assign: bool, tmp_path: Path) -> None:
    source = build_llama()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.1)
    expected = logits(source)
    patch(source)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for patch_it in (False, True):
        model = build_llama()
        if patch_it:
            patch(model)
            logits(model)
            logits(model)
        model.load_state_dict(state, assign=assign)
        found, calls = counts(logits, model)
        assert torch.allclose(found, expected, atol=1e-5)
        assert calls == ((1, NORMS - 1) if patch_it else (0, 0))


def test_pickle_of_a_patched_model_where_fusedops_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_llama()
    patch(model)
    patched = pickle.dumps(model)
    unpatch(model)
    unpatched = pickle.dumps(model)
    for name in [name for name in sys.modules if name.split(".")[0] == "fusedops"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="fusedops"):
        pickle.loads(patched)
    assert type(pickle.loads(unpatched)) is LlamaForCausalLM


# --- replicas ----------------------------------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.filterwarnings("ignore")  # DataParallel's own
def test_data_parallel_over_two_gpus() -> None:
    """Each replica lives for one forward, in a thread of its own, with weights of its own."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_llama().cuda()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    model, ids = Logits(), IDS.repeat(2, 1).cuda()

    def run(module: nn.Module) -> list[Tensor]:
        model.zero_grad()
        found = module(ids)
        found.square().sum().backward()
        return [found, *(p.grad for p in model.parameters())]

    expected = run(model)
    patch(model)
    for wrapped in (nn.DataParallel(model, [0, 1]), nn.DataParallel(model, [0])):
        found, calls = settled(run, wrapped)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        # A replica's first forward is its last, so that no block of it knows of a next one.
        assert calls == ((8, 6) if len(wrapped.device_ids) == 2 else (1, NORMS - 1))
    assert unpatch(model) == NORMS
    assert torch.equal(run(model)[0], expected[0])


# --- child processes ---------------------------------------------------------------------------


def in_child(model: nn.Module, shared: nn.Module, folder: Path) -> None:
    """Runs in a process of its own; what it found it leaves in files."""
    dispatch.INTERPRETED = False
    stream.MIN_ELEMENTS = 0
    with force_operators():
        for name, one in (
            ("sent", model),
            ("loaded", torch.load(folder / "model.pt", weights_only=False)),
        ):
            torch.save(settled(logits, one), folder / f"{name}.pt")
        torch.save(model, folder / "back.pt")
    with torch.no_grad():
        shared.model.norm.weight.zero_()


def test_models_in_files_and_in_arguments_of_spawned_processes(tmp_path: Path) -> None:
    model, shared = build_llama(), build_llama().share_memory()
    patch(model)
    patch(shared)
    expected, calls = settled(logits, model)
    torch.save(model, tmp_path / "model.pt")
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=in_child, args=(model, shared, tmp_path), daemon=True)
    child.start()
    child.join(120)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    for name in ("sent", "loaded"):
        found, child_calls = torch.load(tmp_path / f"{name}.pt")
        assert torch.equal(found, expected), name
        assert child_calls == calls == (1, NORMS - 1)
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert is_patched(back.model.norm)
    found, back_calls = settled(logits, back)
    assert torch.equal(found, expected) and back_calls == calls
    assert unpatch(back) == NORMS
    assert not logits(shared).any()  # the child zeroed the weight of the norm before the head
