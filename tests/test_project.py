# SPDX-License-Identifier: Apache-2.0
"""What holds for every file of the project: licences, exports, layers, examples that run."""

import ast
import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest

import fusedops
from fusedops import integrations

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fusedops", "kernels", "integrations", "tests", "bench", "docs", "examples")
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh")
)
# Module name by file, for what users can import.
MODULES = {
    name: ("" if name.startswith("fusedops/") else "fusedops.")
    + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name in SOURCES
    if name.startswith(("fusedops/", "kernels/", "integrations/"))
}
# The layers from the bottom up: a module imports from its own layer and those below.
LAYERS = ("kernels", "operators", "integrations", "command line")


def layer(module: str) -> int:
    parts = module.split(".")
    if parts[1:2] in (["kernels"], ["integrations"]):
        return LAYERS.index(parts[1])
    return LAYERS.index("command line" if parts[1:2] in (["cli"], ["__main__"]) else "operators")


def imported(path: Path, top_level: bool) -> set[str]:
    """Full names of what a file imports; with ``top_level``, only as it is imported itself."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (top_level and (function or typing_only)):
            pending.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("name", [*SOURCES, "Makefile", ".ci/run"])
def test_licence_line(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    if lines[0].startswith("#!"):
        del lines[0]
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"


@pytest.mark.parametrize("module", [name for name in MODULES.values() if "__main__" not in name])
def test_exports(module: str) -> None:
    if module.startswith("fusedops.kernels"):
        pytest.importorskip("triton")
    loaded = importlib.import_module(module)
    exports = loaded.__all__
    assert len(set(exports)) == len(exports)
    assert [name for name in exports if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    own = layer(MODULES[name])
    above = {
        target
        for target in imported(ROOT / name, top_level=False)
        if target.startswith("fusedops.") and layer(target) > own
    }
    assert above == set()
    if own < LAYERS.index("integrations"):
        outside = {target.split(".")[0] for target in imported(ROOT / name, top_level=True)}
        assert outside.isdisjoint({"transformers", "accelerate", "peft", "rich", "matplotlib"})


@pytest.mark.parametrize("module", MODULES.values())
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in fusedops.__all__ if name[0] != "_"])
def test_every_public_name_shows_an_example(name: str) -> None:
    assert ">>> " in (getattr(fusedops, name).__doc__ or "")


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, number)
        for name in ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
        for number in range(len(python_blocks(name)))
    ],
)
def test_python_blocks_in_the_pages_run(name: str, number: int) -> None:
    code = compile(python_blocks(name)[number], f"{name}, block {number}", "exec")
    exec(code, {"__name__": "__main__"})


def test_readme_has_python_blocks() -> None:
    assert python_blocks("README.md")


@pytest.mark.parametrize(
    "page", sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}), ids=lambda page: page.name
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_page_of_public_names_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "api.py"))["page"]()
    committed = (ROOT / "docs" / "api.md").read_text()
    assert page == committed, "python docs/api.py makes the page anew"
    for name in (*fusedops.__all__, *integrations.__all__):
        assert name.startswith("_") or f"\n### {name}\n" in page


def test_tests_that_pages_name_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for file, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", page.read_text()):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{page.name}: {file}::{name}"


def test_changelog_names_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    if ".dev" not in fusedops.__version__:
        assert headings[1] == fusedops.__version__


def test_constraints_pin_everything_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    names = [re.fullmatch(r"([a-z0-9._-]+)==[\w.]+", line) for line in lines]
    assert all(names), [line for line, name in zip(lines, names, strict=True) if not name]
    assert len({match[1] for match in names if match}) == len(lines)


def test_files_that_must_not_exist() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()
    assert [name for name in SOURCES if Path(name).stem == "utils"] == []
