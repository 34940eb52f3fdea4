# SPDX-License-Identifier: Apache-2.0
"""Plots and the README's tables, from the result files of the other scripts here.

    python bench/plot.py            draw bench/results/*.svg, and rewrite the tables
    python bench/plot.py --check    fail unless they are what the files give

Between the markers in README.md stands nothing but what this writes. A plot names a digest of the
rows it was drawn from, since its bytes depend on the version of matplotlib.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

from record import RESULTS, geometric, group_of, identity

README = RESULTS.parent.parent / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NAMES = {
    "fusedops": "fusedops",
    "torch": "torch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "flash": "FlashAttention",
}
PACKAGES = {"liger": "liger-kernel", "quack": "quack-kernels", "flash": "flash-attn"}
OPERATORS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
BENCHMARKS = ("models", "fidelity", "norms", "launch", "traffic")  # in the README's order
MODELS = {
    "llama-1b": "Llama 1B", "llama-8b": "Llama 8B", "gpt2-small": "GPT-2 small",
    "gpt2-xl": "GPT-2 XL", "qwen3-0.6b": "Qwen3 0.6B", "gemma2-2b": "Gemma 2 2B",
    "bert-base": "BERT base",
}  # fmt: skip
# What counts as norms and adds of a patched model; unpatched ones are mostly elementwise kernels.
REMOVABLE = ("norm", "add")
GPU_BOUND = 0.9  # of the time: a GPU that is busy for less waits for the CPU
WIDTHS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
NOTHING = "Nothing has been measured yet: `make bench`, on a machine with a GPU, does."


def results(folder):
    """{path: content} of these benchmarks' files, others being passed over."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("benchmark") in BENCHMARKS:
            found[path] = content
    return found


def large(lines, direction, operator, provider=None):
    """The timed bf16 rows of one operator and direction at full size, in order of H."""
    group = (operator, direction, "bf16", "")
    chosen = [
        line
        for line in lines
        if "share" in line
        and group_of(line) == group
        and provider in (None, line["provider"])
        and (line["rows"] + 1) * line["width"] > 2**26  # one of each width: not 364800 x 128
    ]
    return sorted(chosen, key=lambda line: line["width"])


# The README ------------------------------------------------------------------------------------


def row_of(cells):
    return f"| {' | '.join(cells)} |"


def table(head, lines):
    return "\n".join(map(row_of, [head, ["---"] * len(head), *lines]))


def against(lines, direction, operator):
    """Of each other contestant's time, what ours is: {name: (geometric mean, lowest)}, best too."""
    ours = {identity(m)[:-1]: m for m in large(lines, direction, operator, "fusedops")}
    ratios, best = {}, {}
    for line in large(lines, direction, operator):
        case, name = identity(line)[:-1], line["provider"]
        if name != "fusedops" and case in ours:
            ratio = ours[case]["share"] / line["share"]
            ratios.setdefault(name, []).append(ratio)
            best[case] = min(ratio, best.get(case, ratio))
    if best:
        ratios["best"] = list(best.values())
    return {name: (geometric(values), min(values)) for name, values in ratios.items()}


def norms_text(content, link):
    lines = content["rows"]
    present = {line["width"] for o in OPERATORS for line in large(lines, "forward", o)}
    widths = [width for width in WIDTHS if width in present]
    timed = {line["provider"] for line in lines if "share" in line}
    others = [name for name in NAMES if name in timed - {"fusedops"}]
    shares, speeds = [], []
    for direction in ("forward", "backward"):
        for operator in OPERATORS:
            ours = {m["width"]: m for m in large(lines, direction, operator, "fusedops")}
            if not ours:
                continue
            name = f"`{operator}`, {direction}"
            shares.append([name, *(percent(ours.get(width)) for width in widths)])
            found = against(lines, direction, operator)
            cells = [f"{found[n][0]:.2f}" if n in found else "–" for n in others]
            if "best" in found:
                cells.append(f"{found['best'][0]:.2f} ({found['best'][1]:.2f})")
            speeds.append([name, *cells, *["–"] * (len(others) + 1 - len(cells))])
    if not shares:
        return ""
    absent = sorted({n for run in content["runs"] for n in run["missing"]} - set(others))
    missing = [f"{NAMES[n]} could not be imported and is absent." for n in absent]
    text = [
        f"GPU time on one {where(content, others)}; bf16, 2^26 elements, 2^27 from H = 8192 on; "
        f"medians of a captured graph's replays. Every figure is in [{link.name}](bench/results/"
        f"{link.name}), drawn in [{link.stem}.svg](bench/results/{link.stem}.svg).",
        "Share of the bandwidth of a device-to-device copy of 2^27 elements, by H"
        f"{smaller_copy(content)}:",
        table(["", *map(str, widths)], shares),
    ]
    if others:
        text += [
            "Speed against each of the others, geometric mean over all H that both can do, and "
            "against the best of them at each H (the lowest of these in brackets); above 1 "
            "fusedops is faster. torch.compile was given a dozen shapes. " + " ".join(missing),
            table(["", *(NAMES[n] for n in others), "best other"], speeds),
        ]
    return "\n\n".join(part.strip() for part in text)


def smaller_copy(content):
    """What a copy of 2^26 elements reaches of it, where that was measured."""
    shares = [
        run["copy_tb_s_of_2^26"] / run["copy_tb_s"]
        for run in content["runs"]
        if "copy_tb_s_of_2^26" in run
    ]
    return f" (a copy of 2^26 reaches {shares[-1]:.0%})" if shares else ""


def percent(line):
    return "–" if line is None else f"{line['share']:.0%}"


def where(content, others):
    run = content["runs"][-1]
    versions = run["versions"]
    parts = [f"torch {versions['torch']}", f"Triton {versions['triton']}"]
    parts += [f"{NAMES[n]} {versions[PACKAGES[n]]}" for n in others if n in PACKAGES]
    return f"{run['gpu']}, {', '.join(parts)}"


def launch_text(content, link):
    lines = [line for line in content["rows"] if "us" in line]
    others = [n for n in NAMES if any(line["provider"] == n for line in lines)]
    body = []
    for mode in ("inference", "training"):
        for operator in OPERATORS:
            case = (mode, operator, 1)
            cells = {
                line["provider"]: line["us"]
                for line in lines
                if (line["mode"], line["operator"], line["rows"]) == case
            }
            if cells:
                times = [f"{cells[n]:.1f}" if n in cells else "–" for n in others]
                body.append([f"`{operator}`, {mode}", *times])
    if not body:
        return ""
    text = (
        "CPU time of one call at 1 x 4096, bf16, in microseconds, the smallest of interleaved "
        f"rounds; torch's add forms are an add and its norm ([{link.name}]"
        f"(bench/results/{link.name})):"
    )
    return f"{text}\n\n{table(['', *(NAMES[n] for n in others)], body)}"


def traffic_text(content, link):
    names = {"torch apart": "torch's add and norm", "apart": "torch's add, our norm",
             "fused": "fused"}  # fmt: skip
    body = []
    for operator in ("rms_norm", "layer_norm"):
        for direction in ("forward", "backward"):
            lines = {
                line["way"]: line
                for line in content["rows"]
                if (line["operator"], line["direction"]) == (operator, direction)
            }
            for way in (way for way in names if way in lines):
                line = lines[way]
                body.append(
                    [f"`{operator}`, {direction}", names[way]]
                    + [f"{line[key]:.0f}" for key in ("least_mb", "read_mb", "written_mb", "us")]
                    + [f"{line['kernels']:g}"]
                )
    text = (
        "What the fusion saves: bytes that the GPU's memory reads and writes for the sum and the "
        "norm of 16384 x 4096 bf16 elements, counted by Nsight Compute, beside the least that "
        f"each way can do with ([{link.name}](bench/results/{link.name})):"
    )
    head = ["", "", "least, MB", "read, MB", "written, MB", "GPU us", "kernels"]
    return f"{text}\n\n{table(head, body)}"


def model_cases(content):
    """[(cells that name the case, its rows by contestant)] of those with adds fused, in order."""
    cases = {}
    for line in content["rows"]:
        case = tuple(line[key] for key in ("model", "measure", "sequences", "tokens"))
        cases.setdefault(case, {})[line["contestant"]] = line
    order = list(MODELS)
    found = []
    for case in sorted(cases, key=lambda case: (order.index(case[0]), *case[1:])):
        model, measure, sequences, tokens = case
        shape = f"batch {sequences}" if measure == "decode" else f"{sequences} x {tokens}"
        if "fused" in cases[case]:
            found.append(([MODELS[model], f"{measure}, {shape}"], cases[case]))
    return found


def models_text(content, link):
    body = []
    for names, lines in model_cases(content):
        base, fused = lines["unpatched"], lines["fused"]
        memory = "–"
        if base["measure"] == "train" and base["peak_memory"]:
            sizes = [f"{line['peak_memory'] / 2**30:.1f}" for line in (base, fused)]
            memory = " → ".join(sizes)
        speeds = [
            f"{lines[name]['best_ratio']:.2f} ({lines[name]['ratio']:.2f})"
            if name in lines else "–"
            for name in ("norms", "fused", "liger")
        ]  # fmt: skip
        kernels = f"{base['kernels']} → {fused['kernels']}"
        body.append([*names, f"{base['min_ms']:.2f}", *speeds, kernels, memory])
    if not body:
        return ""
    versions = content["runs"][-1]["versions"]
    text = (
        f"Whole models of random weights on one {content['runs'][-1]['gpu']}, eager, bf16, "
        f"transformers {versions['transformers']}: the unpatched model's milliseconds, and how "
        "many times as fast it is patched, by the smallest of interleaved times (in brackets the "
        "median of the ratios within a round); Liger is its patch of norms, in a process of its "
        "own; GPU kernels, and for training the peak of memory in GiB, before and after "
        f"([{link.name}](bench/results/{link.name})):"
    )
    head = ["", "", "ms", "norms", "norms and adds", "Liger", "kernels", "memory"]
    return "\n\n".join([text, table(head, body), *profile_parts(content)])


def profile_parts(content):
    """What is left to be gained: a sentence and a table, or nothing where nothing was profiled."""
    body = []
    for names, lines in model_cases(content):
        base, fused = lines["unpatched"], lines["fused"]
        # Older files have no profiles. Decoding a batch takes the kernels of decoding one.
        profiled = base.get("profile") and fused.get("profile")
        if not profiled or (base["measure"] == "decode" and base["sequences"] > 1):
            continue
        kinds = fused["profile"]
        before, after = gpu_ms(base["profile"]), gpu_ms(kinds)
        busy = before / base["min_ms"], after / fused["min_ms"]
        speed = "–"
        if min(busy) >= GPU_BOUND:
            removed = gpu_ms({kind: kinds[kind] for kind in REMOVABLE if kind in kinds})
            speed = f"{before / after:.2f} of {before / (after - removed):.2f}"
        shown = (("matmul",), ("attention",), REMOVABLE)
        rest = tuple(kind for kind in kinds if not any(kind in group for group in shown))
        body.append(
            [*names, f"{fused['min_ms']:.2f}", f"{before:.2f} → {after:.2f}"]
            + [f"{busy[0]:.0%} → {busy[1]:.0%}"]
            + [of_kinds(kinds, group) for group in (*shown, rest)]
            + [speed]
        )
    if not body:
        return []
    text = (
        "What is left to gain with norms and adds fused: the model's milliseconds; the GPU's own "
        "by the kernels of one profiled call, before and after, and their share of the whole (over "
        "100% where the fastest call found a higher clock than the profiled one); the "
        "patched model's kernels by kind, in milliseconds and (in brackets) number. The last "
        "column is how many times as fast the GPU's part has become, of how many it could be at "
        "most: with all norms and adds that remain for nothing, among them adds of rotary "
        f"embeddings and gradients that no norm follows. Where the share is under {GPU_BOUND:.0%} "
        "before or after, the CPU sets the pace, and the GPU's time bounds nothing:"
    )
    head = ["", "", "ms", "GPU, ms", "share", "matmul", "attention", "norms, adds", "rest",
            "GPU's speed"]  # fmt: skip
    return [text, table(head, body)]


def gpu_ms(kinds):
    return sum(kind["gpu_ms"] for kind in kinds.values())


def of_kinds(kinds, names):
    """Milliseconds and number of the kernels of these kinds."""
    chosen = {name: kinds[name] for name in names if name in kinds}
    number = sum(kind["kernels"] for kind in chosen.values())
    return f"{gpu_ms(chosen):.2f} ({number})" if number else "–"


def fidelity_text(content, link):
    body, sentences = [], []
    for line in content["rows"]:
        perplexity, kl, top1 = line["perplexity"], line["kl_mean"], line["top1"]
        ratio = line["distance_ratio"]
        body.append(
            [f"{line['model']}, {line['dtype']}"]
            + [f"{perplexity[name]:.4f}" for name in ("fp32", "unpatched", "patched")]
            + [f"{kl[name]:.2g}" if kl[name] is not None else "–"
               for name in ("unpatched_to_fp32", "patched_to_fp32", "patched")]
            + [f"{top1[name]:.2%}" if top1[name] is not None else "–"
               for name in ("unpatched_to_fp32", "patched_to_fp32", "patched")]
            + ["–" if ratio is None else f"{ratio:.4f}"]
        )  # fmt: skip
        if "losses" in line:
            losses = {name: last(values) for name, values in line["losses"].items()}
            sentences.append(
                f"Trained for {len(line['losses']['unpatched'])} steps in {line['dtype']} the mean "
                f"loss of the last ones is {losses['unpatched']:.4f} unpatched, "
                f"{losses['patched']:.4f} patched, and {losses['nudged']:.4f} unpatched with one "
                "weight changed by one unit in the last place "
                f"([{link.with_suffix('.svg').name}](bench/results/{link.with_suffix('.svg').name}))."
            )
    tokens = content["rows"][0]["tokens"]
    text = (
        f"Real weights on {tokens} tokens of real text: perplexity, mean KL divergence in nats and "
        "agreement of the first token between two of the model in fp32, unpatched (u) and patched "
        "(p), and the distance of the patched model's logits to fp32 over the unpatched one's "
        f"([{link.name}](bench/results/{link.name})):"
    )
    head = ["", "perplexity, fp32", "u", "p", "KL, u to fp32", "p to fp32", "p to u",
            "first token, u and fp32", "p and fp32", "p and u", "distance"]  # fmt: skip
    return "\n\n".join([text, table(head, body), *sentences])


def last(losses):
    """The mean of the last tenth."""
    chosen = losses[-max(1, len(losses) // 10) :]
    return sum(chosen) / len(chosen)


def readme_text(text, found):
    """README.md with the part between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: expected the markers {BEGIN} and {END}")
    makers = (models_text, fidelity_text, norms_text, launch_text, traffic_text)
    order = BENCHMARKS.index
    ordered = sorted(found.items(), key=lambda item: (order(item[1]["benchmark"]), item[0]))
    parts = [makers[order(content["benchmark"])](content, path) for path, content in ordered]
    body = "\n\n".join(part for part in parts if part) or NOTHING
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


# The plots -------------------------------------------------------------------------------------


def digest(content):
    return hashlib.sha256(json.dumps(content["rows"], sort_keys=True).encode()).hexdigest()[:16]


def svg_pyplot():
    """matplotlib.pyplot, which need not be there for the tables, set up for files that repeat."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fusedops"})
    return pyplot


def save(figure, content, path):
    metadata = {"Date": None, "Description": f"rows {digest(content)}"}
    figure.savefig(path, metadata=metadata)
    svg_pyplot().close(figure)


def draw(content, path):
    """Share of copy bandwidth against H: a row of panels a direction, a panel an operator."""
    pyplot = svg_pyplot()
    figure, axes = pyplot.subplots(2, 4, figsize=(15, 6.5), sharex=True, sharey=True)
    for panels, direction in zip(axes, ("forward", "backward"), strict=True):
        for panel, operator in zip(panels, OPERATORS, strict=True):
            for number, (provider, name) in enumerate(NAMES.items()):
                lines = large(content["rows"], direction, operator, provider)
                if not lines:
                    continue
                panel.plot(
                    [line["width"] for line in lines],
                    [100 * line["share"] for line in lines],
                    marker="o" if provider != "compile" else "x",
                    linestyle="-" if provider != "compile" else "",
                    markersize=3, color=f"C{number}", label=name, zorder=3 - 0.1 * number,
                )  # fmt: skip
            panel.set_title(f"{operator}, {direction}", fontsize=9)
            panel.set_xscale("log", base=2)
            panel.set_ylim(0, 105)
            panel.grid(alpha=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("H")
    for panel in axes[:, 0]:
        panel.set_ylabel("% of copy bandwidth")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{content['runs'][-1]['gpu']}, bf16", fontsize=10)
    figure.tight_layout(rect=(0, 0.04, 1, 1))  # room for the legend
    save(figure, content, path)


def draw_losses(content, path):
    """Losses over each other, and how far they lie from the unpatched model's."""
    pyplot = svg_pyplot()
    line = next(line for line in content["rows"] if "losses" in line)
    losses = line["losses"]
    figure, (curves, apart) = pyplot.subplots(1, 2, figsize=(11, 4))
    styles = {"unpatched": ("-", 3.0), "patched": ("-", 1.2), "nudged": (":", 1.2)}
    for name, (style, width) in styles.items():
        curves.plot(losses[name], style, linewidth=width, label=name)
        if name != "unpatched":
            difference = [
                abs(a - b) for a, b in zip(losses[name], losses["unpatched"], strict=True)
            ]
            apart.plot(difference, style, linewidth=width, label=f"{name} - unpatched")
    curves.set_ylabel("loss")
    apart.set_ylabel("|difference of the losses|")
    for panel in (curves, apart):
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    title = f"{line['model']}, {line['dtype']}, AdamW, {content['runs'][-1]['gpu']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save(figure, content, path)


def plot_of(content):
    """What draws the file's plot, or None."""
    if content["benchmark"] == "fidelity":
        return draw_losses if any("losses" in line for line in content["rows"]) else None
    return draw if content["benchmark"] == "norms" else None


def stale(folder, readme):
    """What is not as the files give it."""
    found = results(folder)
    text = readme.read_text()
    problems = [] if readme_text(text, found) == text else [f"{readme.name}: the tables"]
    for path, content in found.items():
        plot = path.with_suffix(".svg")
        if plot_of(content) and not (
            plot.exists() and f"rows {digest(content)}" in plot.read_text()
        ):
            problems.append(plot.name)
    return problems


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    if options.check:
        problems = stale(options.results, options.readme)
        return f"python bench/plot.py would change {', '.join(problems)}" if problems else 0
    found = results(options.results)
    for path, content in found.items():
        if drawn := plot_of(content):
            drawn(content, path.with_suffix(".svg"))
    options.readme.write_text(readme_text(options.readme.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
