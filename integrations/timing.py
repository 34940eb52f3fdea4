# SPDX-License-Identifier: Apache-2.0
"""How fast a model is unpatched, with fused norms, and with its residual adds fused as well.

All contestants share the model's weights and take turns in one process, every round in another
order, with Python's garbage collection off. Each time is a wall time between two synchronises, in
milliseconds. Machines drift, so what counts is the median of the ratios within a round.

- decode: one step of one token a sequence on a cache of ``CONTEXT`` tokens, cropped after each
  step. Left out for models that keep no cache that can be cropped, and for encoder-decoders, whose
  cache also holds the encoder's half.
- prefill: one forward without gradients, the last logits alone where the model can leave out the
  others. An encoder-decoder runs both halves on as many tokens.
- train: forward and backward in training mode, and each of the two by itself. The loss is the
  model's own where it gives logits over its vocabulary for each token, else the mean square of
  its outputs. There is no optimizer step, which patching does not change.
"""

import copy
import gc
import inspect
import operator
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusedops import dispatch
from fusedops.environment import one_line
from fusedops.integrations.loading import SEED, vocabulary
from fusedops.integrations.parity import main_output
from fusedops.integrations.patching import patch, unpatch
from fusedops.integrations.timing_report import Case, KernelTime, TimingReport, TimingRow

__all__ = [
    "CONTEXT",
    "KINDS",
    "MEASURES",
    "VARIANTS",
    "CaseTimes",
    "NotMeasuredError",
    "Plan",
    "Work",
    "add_timings",
    "kernel_times",
    "kind_of",
    "peak_memory",
    "round_ratio",
    "shared_copy",
    "start_report",
    "take_turns",
    "time_case",
    "time_model",
    "token_loss",
    "wall",
    "work_of",
]

MEASURES = ("decode", "prefill", "train")
CONTEXT = 128  # tokens in the cache when a step of decoding begins
WARM_UP = 3  # calls before any that counts: kernels compile, and patched blocks learn
MIN_ROUNDS = 3

COPIES = "copy or fill"
OTHER = "other"
KINDS = (
    (COPIES, r"^Mem(cpy|set)"),
    ("norm", r"(?i)(layer|rms|batch|group)_?norm|norm_(forward|backward)_|GammaBeta|RowwiseMoments"
             r"|weight_gradient_kernel|reduce_partials_kernel|rsqrt|MeanOps"),
    ("attention", r"(?i)flash|fmha|sdpa|attention|^(?!.*LogSoftMax).*softmax"),
    ("matmul", r"(?i)gemm|gemv|nvjet|cutlass|cublas|splitKreduce|xmma|Cijk_|matmul|dot_kernel"),
    ("add", r"CUDAFunctor_add|triton_poi_fused_add_\d"),
    ("elementwise", r"(?i)elementwise|triton_poi"),
    (OTHER, r""),
)  # fmt: skip
"""Kinds of GPU kernels and what their names hold, the first that fits counts.

A norm that is written out in torch's operations is several kernels: mean and root count as norm,
the square, the products and the casts as elementwise.
"""

Step = Callable[[str, int, int], None]


class NotMeasuredError(Exception):
    """The model has nothing of the kind; the message says why."""


def _nothing() -> None:
    pass


# --- contestants -------------------------------------------------------------------------------


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model``'s modules around the same parameters, unpatched; buffers are copies."""
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    unpatch(copied)
    return copied


def _norms_only(model: nn.Module) -> nn.Module:
    copied = shared_copy(model)
    patch(copied, fuse_residual=False)
    return copied


def _fused(model: nn.Module) -> nn.Module:
    copied = shared_copy(model)
    patch(copied)
    return copied


def _compiled(model: nn.Module) -> nn.Module:
    # What was compiled for the case before counts against dynamo's limit of recompilations.
    torch._dynamo.reset()
    compiled: nn.Module = torch.compile(shared_copy(model))  # type: ignore[assignment]
    return compiled


Build = Callable[[nn.Module], nn.Module]

VARIANTS: Mapping[str, Build] = {"unpatched": shared_copy, "norms": _norms_only, "fused": _fused}
"""What is always compared: name -> how a copy of the model is made into it."""

OTHERS: Mapping[str, Build] = {"compile": _compiled}
"""What may be compared in the same process."""


# --- one call ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """``run`` is timed, ``before`` and ``after`` are not; ``devices`` are what it computes on."""

    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    devices: frozenset[torch.device] = frozenset()

    def synchronize(self) -> None:
        for device in self.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    @property
    def cuda(self) -> list[torch.device]:
        return [device for device in self.devices if device.type == "cuda"]


def wall(work: Work) -> float:
    """Milliseconds that one call takes, until the devices are done with it."""
    work.before()
    work.synchronize()
    start = time.perf_counter()
    work.run()
    work.synchronize()
    elapsed = (time.perf_counter() - start) * 1e3
    work.after()
    return elapsed


def kind_of(kernel: str) -> str:
    """Which of `KINDS` a GPU kernel of this name is.

    >>> kind_of("norm_forward_kernel")
    'norm'
    """
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel))


def kernel_times(work: Work) -> dict[str, tuple[int, float]] | None:
    """The GPU kernels of one call, {kind: (number, milliseconds)}; None without CUDA.

    Together the times are those in which a GPU is busy: while two kernels run at once, which ours
    do with what they follow (`fusedops.kernels.config.Gpu`), the time is that of the earlier one.
    """
    if not work.cuda:
        return None
    work.before()
    work.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # acc_events changes nothing for a single cycle, but without it the first one warns.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        work.run()
        work.synchronize()
    work.after()
    found: dict[str, tuple[int, float]] = {}
    until: dict[int, float] = {}  # by GPU, when it has ended all that began so far
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        before = until.get(event.device_index, start)
        until[event.device_index] = max(before, end)
        number, spent = found.get(kind := kind_of(event.name), (0, 0.0))
        found[kind] = number + 1, spent + max(0.0, end - max(start, before)) / 1e3
    return found


def peak_memory(work: Work) -> int | None:
    """The most bytes allocated at once during one call, weights included; None without CUDA.

    The largest over the devices. What else the process holds counts, too, for every contestant
    alike.
    """
    if not work.cuda:
        return None
    for device in work.cuda:
        torch.cuda.reset_peak_memory_stats(device)
    wall(work)
    return max(torch.cuda.max_memory_allocated(device) for device in work.cuda)


# --- taking turns ------------------------------------------------------------------------------


@contextmanager
def _collection_off() -> Iterator[None]:
    """A collection takes some 40 ms in a process full of models, from whoever it happens to hit."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def take_turns(works: Mapping[str, Work], seconds: float) -> dict[str, list[float]]:
    """Rounds in which everybody is called once, for ``seconds``, at least three.

    {name: milliseconds, one a round}. What ran before heats the GPU and fills caches: the order
    rotates from round to round, and turns round when everybody has been first.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    rounds = 0
    with _collection_off():
        deadline = time.perf_counter() + seconds
        while rounds < MIN_ROUNDS or time.perf_counter() < deadline:
            for name in order:
                times[name].append(wall(works[name]))
            order.append(order.pop(0))
            rounds += 1
            if rounds % len(order) == 0:
                order.reverse()
    return times


def round_ratio(times: Mapping[str, Sequence[float]], base: str, name: str) -> float:
    """The median, over the rounds, of how much faster ``name`` was than ``base``.

    >>> round_ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b")
    2.0
    """
    return statistics.median(map(operator.truediv, times[base], times[name]))


# --- what is measured of a model ---------------------------------------------------------------


def work_of(case: Case, model: nn.Module, *, token_loss: bool = True) -> Work:
    """The call of ``model`` that ``case`` times, on token ids drawn with a fixed seed.

    To be built and called in the grad mode and the training mode that the case wants. Training
    works use ``.grad`` of the model's parameters, and set it to None. ``token_loss`` is what
    `token_loss` says of the model. NotMeasuredError where the model has nothing of the kind.
    """
    if case.measure == "decode":
        return _decode(model, case.sequences)
    ids = _token_ids(model, case.sequences, case.tokens)
    devices = _devices(model)
    if case.measure == "prefill":
        arguments = _arguments(model, ids, use_cache=False, logits_to_keep=1)
        return Work(lambda: model(**arguments), devices=devices)
    return _training(case.measure, model, ids, devices, token_loss)


def token_loss(model: nn.Module) -> bool:
    """Whether ``model`` has a loss of its own over next or masked tokens; runs it on four."""
    eager = _eager(model)
    if "labels" not in inspect.signature(eager.forward).parameters:
        return False
    ids = _token_ids(model, 1, 4)
    with torch.no_grad():
        name, output = main_output(eager(**_arguments(model, ids, use_cache=False)))
    size = getattr(getattr(eager, "config", None), "vocab_size", None)
    return name == "logits" and output.shape == (*ids.shape, size)


def _training(
    measure: str,
    model: nn.Module,
    ids: Tensor,
    devices: frozenset[torch.device],
    token_loss: bool,
) -> Work:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise NotMeasuredError(f"no parameter of {type(_eager(model)).__name__} needs a gradient")
    labels = {"labels": ids} if token_loss else {}
    arguments = _arguments(model, ids, use_cache=False, **labels)
    held: list[Tensor] = []  # the loss between forward and backward

    def forward() -> None:
        raw = model(**arguments)
        held.append(raw.loss if token_loss else main_output(raw)[1].float().square().mean())

    def backward() -> None:
        held.pop().backward()

    def step() -> None:
        forward()
        backward()

    def clear() -> None:
        held.clear()
        for parameter in parameters:
            parameter.grad = None

    if measure == "train forward":
        return Work(forward, after=clear, devices=devices)
    if measure == "train backward":
        return Work(backward, before=forward, after=clear, devices=devices)
    return Work(step, after=clear, devices=devices)


def _decode(model: nn.Module, batch: int) -> Work:
    """One step, and the cropping that takes it back.

    Every step sees a cache of the same length: cuDNN's attention plans anew for each new one, some
    3 ms a layer, which whoever comes first would pay for all.
    """
    eager = _eager(model)
    kind, config = type(eager).__name__, getattr(eager, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise NotMeasuredError(f"{kind} is an encoder-decoder, whose cache is of two halves")
    can_generate = getattr(eager, "can_generate", None)
    if not (callable(can_generate) and can_generate()):
        raise NotMeasuredError(f"{kind} does not generate text")
    # transformers 5.24 renamed the argument.
    known = inspect.signature(eager.forward).parameters
    name = next((n for n in ("cache", "past_key_values") if n in known), None)
    if name is None:
        raise NotMeasuredError(f"{kind} takes no cache of keys and values")

    from transformers import DynamicCache

    context = min(CONTEXT, _positions(model, CONTEXT + 1) - 1)
    ids = _token_ids(model, batch, context)
    cache = DynamicCache(config=config)
    arguments: dict[str, Any] = {name: cache, "use_cache": True}
    eager(ids, **arguments)
    token = ids[:, :1]

    def step() -> None:
        model(token, **arguments)

    def back() -> None:
        cache.crop(-1)

    lengths = [cache.get_seq_length()]
    for call in (step, back):
        call()
        lengths.append(cache.get_seq_length())
    if lengths != [context, context + 1, context]:
        raise NotMeasuredError(f"{kind} does not fill a cache that a step can be taken back from")
    return Work(step, after=back, devices=_devices(model))


def _eager(model: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or ``model`` itself."""
    wrapped = model._modules.get("_orig_mod")
    return model if wrapped is None else wrapped


def _arguments(model: nn.Module, ids: Tensor, **options: Any) -> dict[str, Any]:
    """Inputs of a whole forward, with those of ``options`` that the model knows."""
    eager = _eager(model)
    known = inspect.signature(eager.forward).parameters
    inputs = {"input_ids": ids}
    if getattr(getattr(eager, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs | {name: value for name, value in options.items() if name in known}


def _token_ids(model: nn.Module, sequences: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocabulary(_eager(model)), (sequences, tokens), generator=generator)
    return ids.to(next(model.parameters()).device)


def _devices(model: nn.Module) -> frozenset[torch.device]:
    return frozenset(p.device for p in model.parameters() if not p.is_meta)


def _positions(model: nn.Module, otherwise: int) -> int:
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) else otherwise


# --- one case, all contestants -----------------------------------------------------------------


@dataclass(frozen=True)
class CaseTimes:
    """Of one case, by contestant; ``failed`` are those that could not run, and why.

    ``times`` in milliseconds, one a round; ``kernels`` of a call, copies and fills apart;
    ``profiles`` as `kernel_times` gives them; ``peaks`` in bytes; ``calls`` of fusedops' operators
    in one call by (operator, path).
    """

    times: dict[str, list[float]] = field(default_factory=dict)
    kernels: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    calls: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def time_case(
    case: Case,
    models: Mapping[str, nn.Module],
    seconds: float,
    *,
    on_turns: Callable[[], None] = _nothing,
) -> CaseTimes:
    """Warm ``models`` up and let them take turns for ``seconds``; modes of training are set.

    The first is the one that the others are compared with. NotMeasuredError where it has nothing
    of the kind or fails; others that fail are left out. ``on_turns`` is called before the turns.
    """
    found, works = CaseTimes(), {}
    base = next(iter(models))
    with torch.set_grad_enabled(case.trains):
        for model in models.values():
            model.train(case.trains)
        has_loss = case.trains and token_loss(models[base])
        for name, model in models.items():
            try:
                work = work_of(case, model, token_loss=has_loss)
                for _ in range(WARM_UP):
                    wall(work)
                with dispatch.count_calls() as counted:
                    wall(work)
                launched = kernel_times(work)
                found.peaks[name] = None if case.measure == "decode" else peak_memory(work)
            except Exception as error:
                if name == base:
                    raise
                found.failed[name] = _reason(error)
                continue
            found.calls[name] = dict(counted)
            found.profiles[name] = launched or {}
            found.kernels[name] = None
            if launched is not None:
                counts = (number for kind, (number, _) in launched.items() if kind != COPIES)
                found.kernels[name] = sum(counts)
            works[name] = work
        on_turns()
        found.times.update(take_turns(works, seconds))
    return found


def _reason(error: Exception) -> str:
    line = one_line(error)
    return line if isinstance(error, NotMeasuredError) else f"{type(error).__name__}: {line}"


# --- a whole comparison ------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What to measure: ``sequences`` x ``tokens`` for prefill and training, cut to the model's
    positions, and ``seconds`` of turns for each case. With ``halves``, training's forward and
    backward are timed by themselves as well."""

    measures: Sequence[str] = MEASURES
    decode_batches: Sequence[int] = (1, 16)
    sequences: int = 4
    tokens: int = 2048
    seconds: float = 5.0
    halves: bool = True

    def cases(self, model: nn.Module) -> list[Case]:
        tokens = min(self.tokens, _positions(model, self.tokens))
        halves = ["train forward", "train backward"] if self.halves else []
        whole = {"prefill": ["prefill"], "train": ["train", *halves]}
        cases = []
        for measure in self.measures:
            if measure == "decode":
                cases += [Case(measure, batch, 1) for batch in self.decode_batches]
            else:
                cases += [Case(part, self.sequences, tokens) for part in whole[measure]]
        return cases


def time_model(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    against: Sequence[str] = (),
    on_step: Step | None = None,
) -> TimingReport:
    """Time ``model`` unpatched, with its norms patched, and with its residual adds fused as well.

    ``against`` may hold "compile". ``on_step(what, done, total)`` is called before each step. The
    model itself is not run, only copies around its weights, and is left as it was: mode, ``.grad``
    and the random states, too. Ctrl-C ends the timing and gives the report of what is done, with
    ``interrupted`` set.

    ValueError for a measure or a contestant that is not known.

    >>> from fusedops.integrations import load
    >>> plan = Plan(measures=["prefill"], sequences=1, tokens=8, seconds=0.0)
    >>> report = time_model(load("tiny-gpt2").model, plan)
    >>> [row.contestant for row in report.rows]
    ['unpatched', 'norms', 'fused']
    """
    plan = plan or Plan()
    for name, given, known in (
        ("measures", plan.measures, MEASURES),
        ("against", against, tuple(OTHERS)),
    ):
        if unknown := [item for item in given if item not in known]:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {unknown[0]!r}")
    report = start_report(model, plan)
    contestants = {**VARIANTS, **{name: OTHERS[name] for name in against}}
    try:
        add_timings(report, model, contestants, plan, on_step)
    except KeyboardInterrupt:
        report.interrupted = True
    _note_path(report, model)
    return report


def start_report(model: nn.Module, plan: Plan) -> TimingReport:
    """A report without rows."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    devices = {str(device) for device in _devices(model)}
    return TimingReport(
        type(model).__name__, "+".join(sorted(dtypes)), "+".join(sorted(devices)), plan.seconds
    )


def add_timings(
    report: TimingReport,
    model: nn.Module,
    contestants: Mapping[str, Build],
    plan: Plan,
    on_step: Step | None = None,
) -> None:
    """Fill ``report`` case by case, with what each of ``contestants`` makes of ``model``.

    The first of them, "unpatched", is what the others are compared with.
    """
    on_step = on_step or (lambda what, done, total: None)
    cases = plan.cases(model)
    total = 2 * len(cases)
    with _kept_state(model):
        for place, case in enumerate(cases):
            on_step(f"{case.title}: warm-up", 2 * place, total)
            models = {}
            for name, build in contestants.items():
                try:
                    models[name] = build(model)
                except Exception as error:  # what cannot be built does not stop the others
                    report.note(f"{name} left out: {_reason(error)}")
            if next(iter(contestants)) not in models:
                return
            try:
                found = time_case(
                    case,
                    models,
                    plan.seconds,
                    on_turns=lambda c=case, p=place: on_step(  # type: ignore[misc]
                        f"{c.title}: taking turns", 2 * p + 1, total
                    ),
                )
            except Exception as error:
                report.note(f"{case.measure} left out: {_reason(error)}")
                continue
            for name, reason in found.failed.items():
                report.note(f"{case.title}: {name} left out: {reason}")
            report.rows += _rows(case, found)
            report.profile += [
                KernelTime(case.measure, case.sequences, case.tokens, name, kind, number, spent)
                for name in found.times
                for kind, (number, spent) in found.profiles[name].items()
            ]
        on_step("done", total, total)


def _rows(case: Case, found: CaseTimes) -> list[TimingRow]:
    base, times = next(iter(found.times)), found.times
    return [
        TimingRow(
            case.measure,
            case.sequences,
            case.tokens,
            contestant=name,
            median_ms=statistics.median(times[name]),
            min_ms=min(times[name]),
            unpatched_ms=statistics.median(times[base]),
            ratio=round_ratio(times, base, name),
            best_ratio=min(times[base]) / min(times[name]),
            rounds=len(times[name]),
            kernels=found.kernels[name],
            peak_memory=found.peaks[name],
            fused_calls=sum(found.calls[name].values()),
            path="+".join(sorted({path for _, path in found.calls[name]})) or "none",
        )
        for name in times
    ]


def _note_path(report: TimingReport, model: nn.Module) -> None:
    """Say so where the patched models' times are none of Triton's kernels on a GPU."""
    ours = [row for row in report.rows if row.contestant in ("norms", "fused")]
    if any(row.path == "interpreter" for row in ours):
        report.note("kernels ran under Triton's interpreter: these times say nothing about a GPU")
    elif ours and not any(row.fused_calls for row in ours):
        obstacle = dispatch.kernel_obstacle(next(model.parameters()))
        report.note(f"patched models ran their own code ({obstacle or 'no norm called a kernel'})")


@contextmanager
def _kept_state(model: nn.Module) -> Iterator[None]:
    """No gradients inside; those of before, and the random states, afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    python_state = random.getstate()
    devices = [device for device in _devices(model) if device.type == "cuda"]
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            random.setstate(python_state)
            for parameter, gradient in gradients:
                parameter.grad = gradient
