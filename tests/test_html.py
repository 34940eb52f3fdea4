# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison: what is on it, that it loads nothing, and how a browser shows it."""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
import torch

from fusedops import cli, dispatch
from fusedops.integrations import check_parity, load
from fusedops.integrations.html_report import _ms, _number, _share, render
from fusedops.integrations.patching import force_operators
from fusedops.integrations.timing_report import KernelTime, TimingReport, TimingRow

CONTESTANTS = {"unpatched": 12.0, "norms": 10.0, "fused": 8.0, "compile": 9.0, "liger": 11.0}
SHAPES = {
    "decode": (16, 1), "prefill": (4, 2048), "train": (4, 2048), "train forward": (4, 2048),
    "train backward": (4, 2048),
}  # fmt: skip
VOID = {"meta", "path", "rect"}  # of the elements here, those that hold nothing
Found = dict[str, Any]


# --- reports and a reader of pages ---------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison() -> Found:
    """A model in bf16, compared with gradients; its operators run through plain torch."""
    interpreted = dispatch.INTERPRETED
    dispatch.INTERPRETED = False
    try:
        with force_operators():
            model = load("tiny-llama", torch.bfloat16).model
            report = check_parity(
                model, torch.arange(128).reshape(2, 64), backward=True, continuation=3
            )
    finally:
        dispatch.INTERPRETED = interpreted
    return {
        "source": "tiny-llama",
        "batch": 2,
        "sequence_length": 64,
        "seed": 0,
        "date": "2026-03-01T12:34:56+00:00",
        "command": "fusedops compare tiny-llama --html report.html",
        "continuation_text": "over the weir",
        "environment": {
            "fusedops": "0.1.0",
            "commit": "0123456789",
            "python": "3.11.7",
            "platform": "Linux",
            "packages": {"torch": "2.13.0", "liger-kernel": None},
            "cuda": "13.0",
            "hip": None,
            "driver": "570.1",
            "gpus": [{"name": "H200", "capability": "9.0", "memory": 2**37}],
            "no_gpu": None,
            "switches": {"FUSEDOPS_DISABLE": None, "TRITON_INTERPRET": "1"},
        },
        **report.to_dict(),
    }


@pytest.fixture
def found(comparison: Found) -> Found:
    return json.loads(json.dumps(comparison))


def times(*, profiled: bool = True) -> TimingReport:
    """A report with every contestant in every case."""
    report = TimingReport("Some", "bfloat16", "cuda:0" if profiled else "cpu", 5.0)
    for measure, shape in SHAPES.items():
        for name, spent in CONTESTANTS.items():
            is_ours = name in ("norms", "fused")
            report.rows.append(
                TimingRow(
                    measure, *shape, contestant=name, median_ms=spent, min_ms=spent * 0.9,
                    unpatched_ms=12.0, ratio=12.0 / spent, best_ratio=1.25, rounds=37,
                    kernels=1414 if profiled else None,
                    peak_memory=3 * 2**30 if profiled and measure != "decode" else None,
                    fused_calls=33 if is_ours else 0, path="triton" if is_ours else "none",
                    own_process=name == "liger",
                )
            )  # fmt: skip
            if profiled:
                for kind, count in (("norm", 33), ("matmul", 200)):
                    share = spent / 4 * (1 if kind == "norm" else 3)
                    report.profile.append(KernelTime(measure, *shape, name, kind, count, share))
    return report


class Page(HTMLParser):
    """The elements of a page, its tables as rows of cells, and its text; all must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.named: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._text: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = re.sub(r"\s+", " ", "".join(self._text))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
            self.named[dict(attrs).get("id") or ""] = self.tables[-1]
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._text.append(data)
        if self._open and self._open[-1] in ("th", "td"):
            self.tables[-1][-1][-1] += data.strip()

    def classes(self, name: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.elements if name in (a.get("class") or "").split()]


def widths(page: Page, name: str) -> list[float]:
    styles = [attributes["style"] or "" for attributes in page.classes(name)]
    return [float(re.findall(r"(?:width|left): ([\d.]+)%", style)[0]) for style in styles]


# --- what stands on the page ---------------------------------------------------------------------


def test_parity_alone(found: Found) -> None:
    page = Page(render(found))
    assert "Parity holds" in page.text
    assert f"{found['fused_calls']} fused calls through reference" in page.text
    assert "Not timed. With --time" in page.text
    assert "2 × 64 tokens" in page.text
    assert "2026-03-01 12:34 UTC" in page.text
    assert "over the weir" in page.text
    assert not page.classes("headline")
    assert "GPU time by kind" not in page.text
    runs = [found["patched"], found["unpatched_to_fp32"], found["patched_to_fp32"]]
    assert page.named["differences"][1:] == [
        ["largest |Δ|", *(_number(run["max"]) for run in runs)],
        ["mean |Δ|", *(_number(run["mean"]) for run in runs)],
        ["root mean square Δ", *(_number(run["rms"]) for run in runs)],
        ["KL divergence, mean, nats", *(_number(run["kl_mean"]) for run in runs)],
        ["KL divergence, largest, nats", *(_number(run["kl_max"]) for run in runs)],
        ["bit-equal", *(_share(run["bit_equal"]) for run in runs)],
        ["same first token", *(_share(run["top1"]) for run in runs)],
    ]
    assert page.named["blocks"][1:] == [
        [
            block["name"],
            _share(block["bit_equal"]),
            *(
                _number(block[name])
                for name in ("max", "patched_to_unpatched", "unpatched_to_fp32", "patched_to_fp32")
            ),
        ]
        for block in found["blocks"]
    ]
    norms = {(row["norm_class"], row["operator"], row["cast"]) for row in found["patch"]["norms"]}
    assert page.named["norms"][1:] == [
        [norm_class, "7", f"{operator}(cast={cast})"] for norm_class, operator, cast in norms
    ]
    worst = sorted(found["gradients"], key=lambda g: g["ratio"], reverse=True)[:12]
    assert [(row[0], row[-1]) for row in page.named["gradients"][1:]] == [
        (gradient["name"], _number(gradient["ratio"])) for gradient in worst
    ]
    for text in ("H200, 128 GiB", "570.1", "0123456789", "TRITON_INTERPRET", "torch 2.13.0"):
        assert text in page.text
    assert "liger-kernel" not in page.text
    assert found["command"] in page.text


def test_every_contestant_and_case(found: Found) -> None:
    report = times()
    page = Page(render(found | {"timing": report.to_dict()}))
    assert page.text.count("×1.50") >= 3  # the headline of decoding, prefill and training
    rows = [row for row in page.named["times"][1:] if len(row) > 1]
    labels = ["unpatched", "norms only", "full fusion", "torch.compile", "Liger's norms"]
    expected = [
        [
            label, _ms(row.median_ms), _ms(row.min_ms), f"{row.tokens_per_second:,.0f}",
            f"×{row.ratio:.3f}", "×1.250", str(row.fused_calls), "1,414",
            "–" if row.measure == "decode" else "3.00 GiB", "37",
        ]
        for row, label in zip(report.rows, labels * len(SHAPES), strict=True)
    ]  # fmt: skip
    assert rows == expected
    titles = [row[0] for row in page.named["times"][1:] if len(row) == 1]
    assert titles[:2] == ["decode, 16 × 1 token", "prefill, 4 × 2048 tokens"]
    assert len(titles) == len(SHAPES)
    shares = [round(100 * spent / 12, 2) for spent in CONTESTANTS.values()]
    assert widths(page, "bar")[: 5 * len(SHAPES)] == shares * len(SHAPES)
    assert widths(page, "mark")[:5] == [round(0.9 * 100 * v / 12, 2) for v in CONTESTANTS.values()]
    assert "Liger's norms ran in a process of their own" in page.text
    profile = page.tables[1]
    assert profile[2:] == [
        ["matmul", "200", "9.000", "200", "6.000"],
        ["norm", "33", "3.000", "33", "2.000"],
        ["all", "233", "12.00", "233", "8.000"],
    ]
    assert widths(page, "part")[:4] == [75.0, 25.0, 50.0, 16.67]


def test_bars_of_another_process_are_as_long_as_its_unpatched_model_says(found: Found) -> None:
    """It took half as long there: 12 ms against 6 is no faster than 24 against 12."""
    report = times()
    slower = dataclasses.replace(report.rows[4], unpatched_ms=6.0, median_ms=12.0, min_ms=9.0)
    assert slower.own_process
    report.rows[4] = slower
    page = Page(render(found | {"timing": report.to_dict()}))
    assert widths(page, "bar")[:5] == [50.0, *widths(page, "bar")[1:4], 100.0]
    assert widths(page, "mark")[:5] == [45.0, *widths(page, "mark")[1:4], 75.0]


def test_figures_follow_the_report(found: Found) -> None:
    """What is drawn, too: another number gives another page."""
    found["timing"] = times().to_dict()
    before = render(found)
    changes: list[Callable[[Found], object]] = [
        lambda f: f["timing"]["rows"][2].update(median_ms=5.0),
        lambda f: f["timing"]["rows"][2].update(ratio=1.9),
        lambda f: f["timing"]["profile"][4].update(gpu_ms=0.1),
        lambda f: f["patched_to_fp32"].update(mean=0.5),
        lambda f: f["blocks"][1].update(patched_to_fp32=0.5),
        lambda f: f["spread"]["scatter"]["cells"][0].__setitem__(2, 10**6),
        lambda f: f["spread"]["patched_to_fp32"]["counts"].__setitem__(7, 999),
        lambda f: f["patch"]["fused"][0].update(plain=17),
        lambda f: f["continuation"].update(agreed=1),
        lambda f: f.update(seed=4711),
    ]
    for change in changes:
        changed = copy.deepcopy(found)
        change(changed)
        assert render(changed) != before
    assert render(found) == before


def test_interrupted_timing(found: Found) -> None:
    report = times()
    report.rows, report.profile, report.interrupted = report.rows[:5], report.profile[:4], True
    page = Page(render(found | {"timing": report.to_dict()}))
    assert "The timing was interrupted: this is what was done until then." in page.text
    assert len(widths(page, "mark")) == 5
    assert "GPU time by kind of kernel" in page.text
    assert "no case was profiled" in page.text  # of the fused model nothing was
    nothing = TimingReport("Some", "bfloat16", "cuda:0", 5.0, notes=["decode left out: why"])
    nothing.interrupted = True
    page = Page(render(found | {"timing": nothing.to_dict()}))
    assert "Nothing was measured." in page.text
    assert "decode left out: why" in page.text


def test_times_that_say_nothing_of_a_gpu_are_no_headline(found: Found) -> None:
    report = times(profiled=False)
    rows = [row.__dict__ | {"path": "interpreter"} for row in report.rows]
    report.rows = [TimingRow(**row) for row in rows]
    report.note("kernels ran under Triton's interpreter: these times say nothing about a GPU")
    page = Page(render(found | {"timing": report.to_dict()}))
    assert not page.classes("headline")
    assert "there is no speed-up to name" in page.text
    assert "these times say nothing about a GPU" in page.text
    assert "kernels of CUDA devices, and these models ran on cpu" in page.text


def test_a_slower_model_is_called_so(found: Found) -> None:
    report = times()
    rows = [row.__dict__ | {"ratio": 0.9} for row in report.rows]
    report.rows = [TimingRow(**row) for row in rows]
    page = Page(render(found | {"timing": report.to_dict()}))
    assert len(page.classes("slower")) == 3
    assert "ms, slower" in page.text


def test_failures_and_doubts_are_all_named(found: Found) -> None:
    found["patched_to_fp32"]["rms"] = 2 * found["unpatched_to_fp32"]["rms"]
    for gradient in found["gradients"][:2]:
        gradient["patched_to_fp32"] = 1e3
    found["patched"]["bit_equal"] = 0.5
    page = Page(render(found))
    assert "Parity fails" in page.text
    assert page.classes("verdict")[0]["class"] == "verdict bad"
    assert "2.000 times as far from fp32" in page.text
    for gradient in found["gradients"][:2]:
        assert f"the gradient of {gradient['name']} is" in page.text
    for gradient in found["gradients"]:
        gradient["patched_to_fp32"] = 1e3
    left_out = len(found["gradients"]) + 1 - 12
    assert f"and {left_out} more of the kind" in Page(render(found)).text
    found |= {"calls": {}, "no_calls_reason": "FUSEDOPS_DISABLE is set"}
    page = Page(render(found))
    assert "Parity not proven" in page.text
    assert page.classes("verdict")[0]["class"] == "verdict doubt"
    assert "no fused operator ran (FUSEDOPS_DISABLE is set)" in page.text


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_what_is_missing_or_not_finite(found: Found, blocks: int) -> None:
    found["blocks"] = found["blocks"][:blocks]
    for block in found["blocks"]:
        block |= {"unpatched_to_fp32": None, "patched_to_fp32": None, "patched_to_unpatched": 0.0}
    if blocks:
        found["blocks"][-1]["patched_to_unpatched"] = "nan"
    found |= {
        "spread": None, "patch": None, "gradients": None, "continuation": None, "eps": 1e-7,
        "unpatched_to_fp32": None, "patched_to_fp32": None, "notes": ["no fp32 run: too large"],
    }  # fmt: skip
    found["patched"] |= {"max": "nan", "rms": "inf", "kl_mean": None, "kl_max": None, "top1": None}
    found["environment"] |= {"gpus": [], "no_gpu": "no driver", "driver": None, "commit": None}
    page = Page(render(found))
    assert "NaN" in page.text
    assert "∞" in page.text
    assert "no fp32 run: too large" in page.text
    assert "none usable: no driver" in page.text
    assert "The model came patched" in page.text
    assert ("no block's hidden states were recorded" in page.text) == (blocks < 2)
    assert not page.classes("scatter")


def test_all_zero_differences(found: Found) -> None:
    found["patched"] |= dict.fromkeys(("max", "mean", "rms"), 0.0) | {"bit_equal": 1.0}
    found["spread"] |= dict.fromkeys(("patched", "unpatched_to_fp32", "patched_to_fp32"))
    assert "No histogram of differences: all of them are zero" in Page(render(found)).text


# --- that it is safe, self-contained and readable -------------------------------------------------

HOSTILE = (
    """</style></title><script>alert("1")</script><img src=x onerror='alert(1)'>{{ 7*7 }}"&'"""
)


def hostile(value: Any, key: str = "") -> Any:
    """Every text replaced that a model, its files or a user's machine could have written."""
    if isinstance(value, dict):
        named = key in ("reasons", "packages", "switches")
        return {(HOSTILE + name if named else name): hostile(v, name) for name, v in value.items()}
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    fixed = ("date", "measure", "kind", "path", "contestant")
    return HOSTILE if isinstance(value, str) and key not in fixed else value


def test_hostile_names_are_text(found: Found) -> None:
    found["timing"] = times().to_dict()
    found["timing"]["notes"] = ["a note"]
    found["notes"] = ["a note"]
    found["patch"]["norms"][0] |= {"operator": None, "reason": "why"}
    found["patch"]["fused"][0] |= {"reasons": {"why": 3}, "note": "a note", "missed": 1}
    found["timing"]["rows"][4]["contestant"] = HOSTILE
    plain, attacked = Page(render(found)), Page(render(hostile(found)))
    assert attacked.text.count(HOSTILE) > 40
    assert "49" not in attacked.text.replace("7*7", "")
    assert [tag for tag, _ in attacked.elements if tag != "rect"] == [
        tag for tag, _ in plain.elements if tag != "rect"
    ]
    for (_, theirs), (_, ours) in zip(attacked.elements, plain.elements, strict=True):
        assert theirs.keys() == ours.keys()


def test_nothing_is_loaded_and_nothing_runs(found: Found) -> None:
    text = render(found | {"timing": times().to_dict()})
    for part in ("http://", "https://", "url(", "src=", "@import", "<script", "<link", "<iframe"):
        assert part not in text, part
    page = Page(text)
    policies = [a["content"] for _, a in page.elements if a.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert not any(name.startswith("on") for _, a in page.elements for name in a)
    assert not any("href" in a for _, a in page.elements)


def test_structure_for_screen_readers(found: Found) -> None:
    page = Page(render(found | {"timing": times().to_dict()}))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in page.elements:
        if tag == "th":
            assert attributes["scope"] in ("col", "row", "colgroup", "rowgroup")
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert page.elements[0] == ("html", {"lang": "en"})


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


@pytest.mark.usefixtures("no_kernels")
def test_command_writes_the_page_of_its_json(tmp_path: Path) -> None:
    """Also where parity is not proven, as here, without kernels, and for names that are no text."""
    page, report = tmp_path / "\udcff.html", tmp_path / "report.json"
    arguments = ["compare", "tiny-gpt2", "--device", "cpu", "--continuation", "2"]
    arguments += ["--json", str(report), "--html", str(page)]
    assert cli.main(arguments) == 1
    found = json.loads(report.read_text())
    written = page.read_text(encoding="utf-8")
    assert written == render(found).replace("\udcff", "\\udcff")
    assert "Parity not proven" in written
    assert Page(written).text.count("1 × 64 tokens") == 2
    assert found["command"].startswith("fusedops compare tiny-gpt2 --device cpu --continuation 2 ")
    assert found["seed"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"\udcff.html", "report.json"}


@pytest.mark.usefixtures("no_kernels", "interrupted_turns")
def test_command_writes_what_an_interrupt_left(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["compare", "tiny-gpt2", "--device", "cpu", "--continuation", "0", "--time"]
    arguments += ["--measure", "prefill", "train", "--shape", "1x4", "--html", str(page)]
    assert cli.main(arguments) == 130
    written = Page(page.read_text(encoding="utf-8"))
    assert "The timing was interrupted" in written.text
    assert [row[0] for row in written.named["times"][1:]] == [
        "prefill, 1 × 4 tokens", "unpatched", "norms only", "full fusion",
    ]  # fmt: skip


# --- in a browser --------------------------------------------------------------------------------

# Text whose contrast with the nearest background that is no glass is below 4.5, as WCAG counts it.
PALE = """(() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return numbers(getComputedStyle(document.body).backgroundColor);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node; node = walker.nextNode();) {
    if (!node.data.trim()) continue;
    const [a, b] = [light(numbers(getComputedStyle(node.parentElement).color)),
                    light(behind(node.parentElement))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push([node.data.trim(), (a + 0.05) / (b + 0.05)]);
  }
  return found;
})()"""
# What sticks out to the right, other than in boxes that scroll by themselves.
OUTSIDE = """[...document.body.querySelectorAll('*')]
  .filter(e => !e.parentElement.closest('.scroll'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => e.outerHTML.slice(0, 100))"""
OPEN = "document.querySelectorAll('details').forEach(d => { d.open = true })"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"none of {', '.join(browser.NAMES)} on PATH, and CHROMIUM names none")
    running = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def pages(comparison: Found, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page with everything on it, and one that fails, of names that do not break."""
    full = json.loads(json.dumps(comparison)) | {"timing": times().to_dict()}
    failed = json.loads(json.dumps(comparison))
    long = "a" * 200
    failed |= {"source": long, "model": long, "mismatch": long, "notes": [long], "command": long}
    failed["patch"]["norms"][0] |= {"norm_class": long, "operator": None, "reason": long}
    failed["patch"]["fused"][0] |= {"block_class": long, "reasons": {long: 3}}
    failed["continuation_text"] = HOSTILE + long
    folder = tmp_path_factory.mktemp("pages")
    for name, found in (("full", full), ("failed", failed)):
        (folder / f"{name}.html").write_text(render(found), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in ("full", "failed")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["full", "failed"])
def test_in_a_browser(
    chromium: browser.Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    media = {"prefers-color-scheme": scheme}
    chromium.visit(pages[name], width=width, height=800, media=media)
    assert chromium.evaluate("document.title").endswith("fusedops compare")
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness > 200) if scheme == "light" else (brightness < 40)
    for _ in range(2):  # details closed, and open
        assert chromium.evaluate("document.documentElement.scrollWidth") <= width
        assert chromium.evaluate(OUTSIDE) == []
        assert chromium.evaluate(PALE) == []
        chromium.evaluate(OPEN)
    seen = [event["method"] for event in chromium.events]
    trouble = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown",
               "Network.loadingFailed")  # fmt: skip
    assert not set(trouble) & set(seen), chromium.events
    assert seen.count("Network.requestWillBeSent") == 1  # the page itself


def test_in_print(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    """Light whatever the scheme, and with everything that is folded on the screen."""
    chromium.visit(pages["full"], width=700, height=900, media={"prefers-color-scheme": "dark"})
    chromium.call("Emulation.setEmulatedMedia", media="print",
                  features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert min(map(int, re.findall(r"\d+", background)[:3])) > 200
    assert chromium.evaluate("document.querySelector('#times').getBoundingClientRect().height") > 0
    chromium.call("Emulation.setEmulatedMedia", media="")


def test_the_browser_would_tell(chromium: browser.Browser, tmp_path: Path) -> None:
    """Of a page with each of the troubles that the pages above have not."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<body style='margin:0; background: #fff'><div style='width:9999px; color: #eee'>pale</div>"
        "<img src='absent.png'><script>console.error('no'); absent()</script>"
    )
    chromium.visit(page, width=360, height=800, media={})
    seen = {event["method"] for event in chromium.events}
    assert {"Network.loadingFailed", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= seen
    assert chromium.evaluate("document.documentElement.scrollWidth") > 360
    assert chromium.evaluate(OUTSIDE)
    assert math.isclose(chromium.evaluate(PALE)[0][1], 1.16, abs_tol=0.01)
