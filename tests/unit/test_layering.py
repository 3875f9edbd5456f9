"""Imports go one way: types, config ◀ engine ◀ weights ◀ worker ◀ integrations ◀ recipes; observe is handed to whoever
reports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rollout"

# What each part may import, beside itself. The package's front door gathers names for users, so it may see the worker;
# nothing inside may import it, for then everything would depend on everything.
ALLOWED = {
    "types": set(),
    "config": set(),
    "observe": set(),
    "engine": {"types", "config"},
    "weights": {"types", "config", "engine"},
    "calls": {"types", "observe", "engine"},
    "mail": {"types", "engine"},
    "worker": {"types", "config", "observe", "engine", "weights", "calls", "mail"},
    "integrations": {"types", "config", "observe", "worker"},
    "__init__": {"types", "config", "observe", "worker"},
}
# Inside functions, or under TYPE_CHECKING, where the cycle ends before it begins.
DEFERRED = {("worker", "integrations")}

TRAINERS = {"trl", "datasets", "wandb"}
"""Only integrations know them."""
EXTRAS = TRAINERS | {"peft", "accelerate", "reasoning_gym"}
"""What a plain install lacks: never imported while the package is."""


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree: ast.AST, module: str) -> list[tuple[str, bool]]:
    """Absolute names that a module imports, each with whether it does so when it is imported itself."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            name = ".".join(filter(None, [base, node.module]))
            # `from rollout import worker` names a part as well
            found.extend((f"{name}.{alias.name}" if name == "rollout" else name, at_import) for alias in node.names)
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        for child in ast.iter_child_nodes(node):
            walk(child, at_import and not later)

    walk(tree, True)
    return found


def all_imports() -> list[tuple[Path, str, str, bool]]:
    """(file, part, imported name, at import) of each import in the package."""
    result = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name, at_import in imports(ast.parse(path.read_text(encoding="utf-8")), module):
            result.append((path, part_of(path), name, at_import))
    return result


def test_the_walker_sees_every_form_of_import():
    source = """
import rollout.worker
from rollout import worker as w
from rollout.engine.slots import Slot
from . import slots
from ..types import Request
if TYPE_CHECKING:
    import trl
def f():
    import wandb
class C:
    import datasets
"""
    assert imports(ast.parse(source), "rollout.engine.engine") == [
        ("rollout.worker", True),
        ("rollout.worker", True),
        ("rollout.engine.slots", True),
        ("rollout.engine", True),
        ("rollout.types", True),
        ("trl", False),
        ("wandb", False),
        ("datasets", True),
    ]


def test_every_part_has_its_place():
    assert {part_of(path) for path in PACKAGE.rglob("*.py")} <= set(ALLOWED)


def test_imports_go_one_way():
    wrong = []
    for path, part, name, at_import in all_imports():
        if name.split(".")[0] != "rollout":
            continue
        target = [*name.split("."), "__init__"][1]
        if target != part and target not in ALLOWED[part] and (at_import or (part, target) not in DEFERRED):
            wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_integrations_import_trainers():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, part, name, _ in all_imports()
        if name.split(".")[0] in TRAINERS and part != "integrations"
    ]
    assert not wrong, "\n".join(wrong)


def test_a_plain_install_is_enough_to_import():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, part, name, at_import in all_imports()
        if name.split(".")[0] in EXTRAS and at_import and part != "integrations"
    ]
    assert not wrong, "\n".join(wrong)


def test_observe_needs_no_torch():
    names = {name.split(".")[0] for _, part, name, _ in all_imports() if part == "observe"}
    assert "torch" not in names
    assert "numpy" in names


@pytest.mark.parametrize("module", ["rollout", "rollout.engine.engine", "rollout.weights.exchange"])
def test_importing_brings_no_trainer(module):
    code = f"import sys, {module}; print(*sorted({TRAINERS!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
