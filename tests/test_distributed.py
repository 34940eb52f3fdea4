# SPDX-License-Identifier: Apache-2.0
"""Patched models under the engines that spread one over processes: two of them, with gloo.

The operators are forced, so that streams and operators really run on the CPU; what each process
computes is compared with the unpatched model on one.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_llama
from torch import Tensor, distributed, nn

import fusedops
from fusedops import dispatch
from fusedops.integrations import patch, stream, unpatch
from fusedops.integrations.patching import force_operators

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

WORLD = 2
SECONDS = 60  # a rank that waits for a dead one gives up after these
IDS = torch.tensor([[5, 9, 33, 2, 17, 60, 8], [1, 44, 7, 12, 3, 3, 29]])  # a row for each rank
NORMS = 7  # of the model below, six of which follow an add


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    named = model.named_parameters()
    return {n.removeprefix("module."): p.grad.clone() for n, p in named if p.grad is not None}


def counts(function: Callable[..., Any], *args: Any) -> tuple[Any, int, int]:
    """(result, norms called by themselves, norms fused with an add)."""
    with dispatch.count_calls() as calls:
        result = function(*args)
    fused = sum(count for (name, _), count in calls.items() if name.startswith("add_"))
    return result, sum(calls.values()) - fused, fused


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over the ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Equal up to the order of sums; in a half dtype each result as a whole, to 4 roundings."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        other, one = whole(found[name]), whole(one)
        assert other.shape == one.shape, name
        if dtype is torch.float32:
            assert torch.allclose(other, one, atol=1e-6, rtol=1e-3), name
        else:
            assert (other - one).norm() <= 4 * torch.finfo(dtype).eps * one.norm(), name


# --- the ranks ---------------------------------------------------------------------------------


def serve(rank: int, port: int, pipe: Connection) -> None:
    """Run what comes through the pipe, in a process group, until None comes."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",  # transformers would put its share of a model on a GPU
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
    }
    torch.set_num_threads(1)
    dispatch.INTERPRETED = False
    stream.MIN_ELEMENTS = 0
    distributed.init_process_group(
        "gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=SECONDS)
    )
    while (task := pipe.recv()) is not None:
        check, arguments = task
        torch.manual_seed(0)
        try:
            with force_operators():
                check(rank, *arguments)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send("")
    distributed.destroy_process_group()


class Ranks:
    """Two processes that run a function of this module at once; it is given its rank first."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, check: Callable[..., None], *arguments: Any) -> None:
        if not self.processes:
            self.start()
        failures = {}
        for pipe in self.pipes:
            pipe.send((check, arguments))
        for rank, pipe in enumerate(self.pipes):
            try:
                failure = pipe.recv() if pipe.poll(2 * SECONDS) else "does not answer"
            except EOFError:
                failure = "has died"
            if failure:
                failures[rank] = failure
        if failures:
            self.stop(0)  # they may wait for each other at different places; the next start anew
            pytest.fail("\n".join(f"rank {r}: {text}" for r, text in failures.items()))

    def stop(self, seconds: float) -> None:
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
        self.pipes, self.processes = [], []


@pytest.fixture(scope="module")
def run() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.stop(SECONDS)


# --- data parallelism --------------------------------------------------------------------------


def check_ddp(rank: int, patch_first: bool, options: dict[str, bool]) -> None:
    from torch.nn.parallel import DistributedDataParallel

    expected = gradients(build_llama(), IDS)
    model = build_llama()
    if patch_first:
        patch(model)
    wrapped = DistributedDataParallel(model, **options)
    if not patch_first:
        assert patch(wrapped).patched == NORMS
    for _ in range(3):
        found, alone, fused = counts(gradients, wrapped, IDS[rank : rank + 1])
        assert_close(found, expected)
    assert (alone, fused) == (1, NORMS - 1)
    assert unpatch(wrapped) == NORMS
    found, alone, fused = counts(gradients, wrapped, IDS[rank : rank + 1])
    assert_close(found, expected)
    assert alone + fused == 0


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("patch_first", [True, False])
def test_ddp(run: Ranks, patch_first: bool, options: dict[str, bool]) -> None:
    run(check_ddp, patch_first, options)


def check_accumulation(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    halves = IDS[rank : rank + 1].tile(2, 1)
    expected = {name: 2 * g for name, g in gradients(build_llama(), IDS).items()}
    model = build_llama()
    patch(model)
    wrapped = DistributedDataParallel(model)
    for _ in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(halves[:1], labels=halves[:1]).loss.backward()
        wrapped(halves[1:], labels=halves[1:]).loss.backward()
        assert_close({n: p.grad for n, p in model.named_parameters()}, expected)


def test_ddp_accumulates_gradients(run: Ranks) -> None:
    run(check_accumulation)


def check_fully_shard(
    rank: int,
    patch_first: bool,
    norms_too: bool = False,
    dtype: torch.dtype = torch.float32,
    checkpointed: bool = False,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    ids = IDS[rank : rank + 1]

    def shard(model: Any) -> Any:
        if checkpointed:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
        for module in (*(norms if norms_too else ()), *model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model

    expected = gradients(build_llama(), IDS)
    if dtype is not torch.float32:
        expected = gradients(shard(build_llama()), ids)
    model = build_llama()
    if patch_first:
        patch(model)
    shard(model)
    if not patch_first:
        assert patch(model).patched == NORMS
    for _ in range(3):
        found, alone, fused = counts(gradients, model, ids)
        assert_close(found, expected, dtype)
    if checkpointed:
        assert alone + fused == 2 * NORMS - 1  # the last norm is in no block
    else:
        assert alone + fused == NORMS
    if not norms_too:
        assert fused >= 3
    unpatch(model)
    found, alone, fused = counts(gradients, model, ids)
    assert_close(found, expected, dtype)
    assert alone + fused == 0


@pytest.mark.parametrize("norms_too", [False, True], ids=["blocks", "norms"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_fully_shard(run: Ranks, patch_first: bool, norms_too: bool) -> None:
    run(check_fully_shard, patch_first, norms_too)


@pytest.mark.parametrize("patch_first", [True, False])
def test_fully_shard_in_mixed_precision(run: Ranks, patch_first: bool) -> None:
    run(check_fully_shard, patch_first, False, torch.bfloat16)


@pytest.mark.parametrize("patch_first", [True, False])
def test_fully_shard_with_gradient_checkpointing(run: Ranks, patch_first: bool) -> None:
    run(check_fully_shard, patch_first, False, torch.float32, True)


# --- tensor and sequence parallelism -----------------------------------------------------------


def check_tensor_parallel(rank: int, folder: str) -> None:
    from transformers import LlamaForCausalLM

    expected = gradients(LlamaForCausalLM.from_pretrained(folder), IDS)
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    up = model.model.layers[0].mlp.up_proj.weight
    local = up.to_local() if hasattr(up, "to_local") else up
    assert local.shape == (48 // WORLD, 32)
    assert patch(model).patched == NORMS
    for _ in range(3):
        found, alone, fused = counts(gradients, model, IDS)
        assert_close(found, expected)
    assert (alone, fused) == (1, NORMS - 1)
    assert unpatch(model) == NORMS
    found, alone, fused = counts(gradients, model, IDS)
    assert_close(found, expected)
    assert alone + fused == 0


def test_transformers_tensor_parallelism(run: Ranks, tmp_path: Path) -> None:
    build_llama().save_pretrained(tmp_path)
    run(check_tensor_parallel, str(tmp_path))


class Norms(nn.Module):
    """A norm of either kind, and one that follows an add inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.rms = nn.RMSNorm(16, eps=1e-5)
        self.layer = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.rms(x))


def check_sequence_parallel(rank: int, length: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    x = torch.randn(2, length, 16)

    def results(how: str) -> dict[str, Tensor]:
        torch.manual_seed(4)
        model = nn.Sequential(Norms(), Norms())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        if how == "patched, spread":
            assert patch(model).patched == 4
        rows: Tensor = x.clone()
        if how != "whole":
            plan = {"rms": SequenceParallel(), "layer": SequenceParallel()}
            for block in model:
                parallelize_module(block, mesh, plan)
            rows = distribute_tensor(x, mesh, [Shard(1)])
        if how == "spread, patched":
            assert patch(model).patched == 4
        rows.requires_grad_()
        for _ in range(3):
            model.zero_grad()
            rows.grad = None
            with CommDebugMode() as communication:
                y = model(rows)
                assert communication.get_total_counts() == 0
                y.square().sum().backward()
            if how != "whole":
                assert isinstance(y, DTensor) and y.placements == (Shard(1),)
                assert rows.grad is not None and rows.grad.placements == (Shard(1),)
                assert not any("gather" in str(op) for op in communication.get_comm_counts())
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        return {"y": whole(y.detach()), "x": whole(rows.grad), **grads}

    expected = results("whole")
    for how in ("spread", "patched, spread", "spread, patched"):
        assert_close(results(how), expected)


@pytest.mark.parametrize("length", [6, 5])  # 5: the ranks' shares differ
def test_sequence_parallelism(run: Ranks, length: int) -> None:
    run(check_sequence_parallel, length)


def check_functions_on_dtensors(rank: int, name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    function = getattr(fusedops, name)
    plain = {"x": torch.randn(2, 5, 16), "weight": torch.randn(16)}
    if name.startswith("add_"):
        plain["residual"] = torch.randn(2, 5, 16)
    if "layer" in name:
        plain["bias"] = torch.randn(16)

    def results(spread: bool) -> dict[str, Tensor]:
        leaves = {}
        for key, tensor in plain.items():
            if spread:
                placement = Shard(1) if tensor.dim() == 3 else Replicate()
                tensor = distribute_tensor(tensor, mesh, [placement])
            leaves[key] = tensor.detach().clone().requires_grad_()
        with CommDebugMode() as communication:
            out = function(**leaves)
            assert communication.get_total_counts() == 0
            outputs = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward([o.square().sum() for o in outputs])
        if spread:
            assert all(isinstance(o, DTensor) and o.placements == (Shard(1),) for o in outputs)
            assert not any("gather" in str(op) for op in communication.get_comm_counts())
        grads = {key: whole(leaf.grad) for key, leaf in leaves.items()}
        return {str(i): whole(o.detach()) for i, o in enumerate(outputs)} | grads

    assert_close(results(True), results(False))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_functions_on_dtensors(run: Ranks, name: str) -> None:
    run(check_functions_on_dtensors, name)


# --- weights that are elsewhere ----------------------------------------------------------------


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with force_operators():
        yield


def empty_between_calls(model: nn.Module, of: str) -> None:
    """Parameters are empty but while a norm, or a block, runs: what DeepSpeed's ZeRO-3 does."""
    kept: dict[nn.Parameter, Tensor] = {}

    def fill(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = kept[parameter]

    def release(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = torch.empty(0)

    layers = list(model.model.layers)
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    for module in norms if of == "norms" else [*layers, model.model.norm]:
        kept.update({parameter: parameter.data for parameter in module.parameters()})
        release(module)
        module.register_forward_pre_hook(fill)
        module.register_forward_hook(release)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("of", ["norms", "blocks"])
def test_weights_that_are_empty_between_calls(of: str, forced: None) -> None:
    model = build_llama()
    expected = logits(model)
    patch(model)
    logits(model)
    logits(model)  # what follows what is known, and hand-overs are made
    empty_between_calls(model, of)
    for _ in range(3):
        found, alone, fused = counts(logits, model)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert alone + fused == NORMS
    if of == "blocks":
        assert fused == 3  # inside each block; none across, where the next weight is not there
    unpatch(model)
    assert torch.equal(logits(model), expected)


def test_empty_weights_are_named_and_left_alone(forced: None) -> None:
    model = build_llama()
    expected = logits(model)
    empty_between_calls(model, "blocks")
    with pytest.raises(ValueError, match="its weight is empty"):
        patch(model)
    model.model.norm = build_llama().model.norm
    assert patch(model).patched == 1
    for _ in range(3):
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


def test_a_norm_with_an_empty_weight_says_what_the_original_says(forced: None) -> None:
    model = build_llama()
    norm, x = model.model.norm, torch.randn(2, 32)
    patch(model)
    norm.weight.data = torch.empty(0)
    with pytest.raises(RuntimeError) as found:
        norm(x)
    unpatch(model)
    with pytest.raises(RuntimeError) as original:
        norm(x)
    assert str(found.value) == str(original.value)


def test_disk_offload(tmp_path: Path, forced: None) -> None:
    from accelerate import disk_offload

    model = build_llama()
    expected = logits(model)
    patch(model)
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for _ in range(3):
        found, alone, fused = counts(logits, model)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert alone + fused == NORMS
    unpatch(model)
    assert torch.equal(logits(model), expected)
