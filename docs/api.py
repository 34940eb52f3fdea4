# SPDX-License-Identifier: Apache-2.0
"""The public names with their signatures and docstrings, as a page.

    python docs/api.py            writes docs/api.md

Signatures are taken from the source text, so that they look the same on every Python and torch.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
WIDTH = 92

HEADER = """\
# Public functions and classes

Made by `python docs/api.py` from the docstrings.
"""

# Classes of results, which nobody needs to import: module, names.
RESULTS = {
    "fusedops.precompile": ["WarmupReport"],
    "fusedops.integrations.loading": ["LoadedModel"],
    "fusedops.integrations.report": ["NormRow", "FusedRow"],
    "fusedops.integrations.parity_report": [
        "Difference",
        "BlockDrift",
        "Continuation",
        "GradientDrift",
    ],
}


def page() -> str:
    import fusedops
    import fusedops.integrations

    parts = [HEADER]
    for module in (fusedops, fusedops.integrations):
        parts.append(f"## {module.__name__}\n")
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                parts += describe(thing)
    parts.append("## What they return\n")
    for module_name, names in RESULTS.items():
        for name in names:
            parts += describe(getattr(sys.modules[module_name], name))
    return "\n".join(parts)


def describe(thing: Any) -> Iterator[str]:
    """Heading, signature and docstring; of a class its public members, too."""
    source = textwrap.dedent(inspect.getsource(thing))
    (node,) = ast.parse(source).body
    yield f"### {thing.__name__}\n"
    if isinstance(node, ast.FunctionDef):
        yield code(signature(source, node))
        yield text(thing)
        return
    assert isinstance(node, ast.ClassDef)
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    lines = [f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".replace("()", "")]
    if "__init__" in methods:
        lines.append(signature(source, methods.pop("__init__"), node.name))
    if dataclasses.is_dataclass(thing):
        fields = [segment(source, item) for item in node.body if isinstance(item, ast.AnnAssign)]
        lines += [
            "    *" if field == "_: KW_ONLY" else f"    {field}"
            for field in fields
            if "repr=False" not in field  # for the class's own use
        ]
    if "forward" in methods:
        lines.append(signature(source, methods.pop("forward")))
    yield code("\n".join(lines))
    yield text(thing)
    members = [
        *noted_fields(node),
        *(
            member(source, method)
            for name, method in methods.items()
            if not name.startswith("_") and ast.get_docstring(method)
        ),
    ]
    if members:
        yield "".join(members)


def noted_fields(node: ast.ClassDef) -> Iterator[str]:
    """Fields that a string below them explains."""
    for field, note in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr):
            written = inspect.cleandoc(ast.literal_eval(note.value)).replace("\n", "\n  ")
            yield f"- `{ast.unparse(field.target)}`: {markdown(written)}\n"


def segment(source: str, node: ast.AST) -> str:
    found = ast.get_source_segment(source, node)
    assert found is not None
    return found


def signature(source: str, node: ast.FunctionDef, name: str = "") -> str:
    """The call as the source writes it, on one line or with a line for each argument."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
    parts = [argument(source, *pair) for pair in zip(plain, defaults, strict=True)]
    if arguments.kwonlyargs:
        parts.append("*")
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        parts += [argument(source, *pair) for pair in pairs]
    if parts[:1] == ["self"]:
        del parts[0]
    result = "" if name or node.returns is None else f" -> {segment(source, node.returns)}"
    call = f"{name or node.name}({', '.join(parts)}){result}"
    if len(call) > WIDTH:
        inside = "".join(f"    {part},\n" for part in parts)
        call = f"{name or node.name}(\n{inside}){result}"
    return call


def argument(source: str, node: ast.arg, default: ast.expr | None) -> str:
    written = node.arg
    if node.annotation is not None and not ast.unparse(node.annotation).startswith("_"):
        written += f": {segment(source, node.annotation)}"
    if default is None:
        return written
    return written + (" = " if ":" in written else "=") + segment(source, default)


def member(source: str, node: ast.FunctionDef) -> str:
    """One method or property, as an item of a list."""
    is_property = any(ast.unparse(one) == "property" for one in node.decorator_list)
    call = signature(source, node)
    written = f"- `{node.name}`" if is_property else f"- `{call}`"
    lines = (ast.get_docstring(node) or "").replace("\n", "\n  ")
    return re.sub(r"\n +\n", "\n\n", f"{written}: {markdown(lines)}\n")


def code(lines: str) -> str:
    return f"```py\n{lines}\n```\n"


def text(thing: Any) -> str:
    """The docstring in Markdown: sections and fields as lists, examples as code."""
    fields = {field.name for field in dataclasses.fields(thing)} if is_data(thing) else set()
    parts = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(thing.__doc__)):
        lines = paragraph.split("\n")
        title = re.fullmatch(r"(Args|Returns|Raises):", lines[0])
        if lines[0].lstrip().startswith(">>> "):
            parts.append(f"```pycon\n{textwrap.dedent(paragraph)}\n```")
        elif title and title[1] == "Args":
            parts.append("Arguments:\n\n" + items(textwrap.dedent("\n".join(lines[1:]))))
        elif title:
            parts.append(f"{title[1]}: " + markdown(textwrap.dedent("\n".join(lines[1:]))))
        elif lines[0].partition(":")[0] in fields:
            parts.append(items(paragraph))
        elif lines[0].startswith("    "):
            parts.append(paragraph)
        else:
            parts.append(markdown(paragraph).replace("::", ":"))
    return "\n\n".join(parts) + "\n"


def is_data(thing: Any) -> bool:
    return inspect.isclass(thing) and dataclasses.is_dataclass(thing)


def items(lines: str) -> str:
    """``name: what`` with indented lines below, as a list."""
    listed = []
    for line in lines.split("\n"):
        if line.startswith(" "):
            listed.append("  " + markdown(line.strip()))
        else:
            names, _, what = line.partition(": ")
            listed.append(f"- `{names}`: {markdown(what)}")
    return "\n".join(listed)


def markdown(prose: str) -> str:
    """Double backquotes as single ones, and no emphasis by accident."""
    spans = re.split(r"(``.+?``|`.+?`)", prose, flags=re.DOTALL)
    return "".join(
        span.replace("``", "`") if span.startswith("`") else span.replace("*", r"\*")
        for span in spans
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    PAGE.write_text(page())
    print(f"written to {PAGE}")
