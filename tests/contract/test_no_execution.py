"""Data stays data: no line of the product makes code, or a command of a shell, of what somebody stored or sent."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.contract.project import PRODUCT, ROOT, files_in

#: Modules that build objects, or run text, from bytes.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "yaml", "code", "codeop"}

#: Functions that run text: alone, or as `module.function`.
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput", "runpy.run_path"}


def product() -> Iterator[tuple[Path, ast.AST]]:
    """Yield each module of the product, parsed."""
    for path in files_in(*PRODUCT):
        if path.suffix == ".py":
            yield path.relative_to(ROOT), ast.parse(path.read_bytes())


def named(node: ast.expr) -> str:
    """Return `a.b` for an expression of names; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{named(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_no_module_that_builds_objects_is_imported() -> None:
    """Jobs, results and settings are msgpack, JSON and text: nothing that makes objects of bytes is imported."""
    found = []
    for path, tree in product():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path, name) for name in names if name.partition(".")[0] in MODULES]
    assert [] == found


def test_no_text_is_run() -> None:
    """No eval, no exec, no shell: the one thing that is started by a line of text is `--serve`, split into words."""
    found = []
    for path, tree in product():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                if named(node.func) in CALLS:
                    found.append((path, node.lineno, named(node.func)))
                shell = [word.value for word in node.keywords if word.arg == "shell"]
                found += [(path, node.lineno, "shell") for value in shell if ast.unparse(value) != "False"]
                if named(node.func).endswith("create_subprocess_shell"):
                    found.append((path, node.lineno, "shell"))
    assert [] == found


def test_lua_scripts_make_no_code_either() -> None:
    """No script makes a function of text (loadstring), and none is put together from data: they are files."""
    for path in files_in("scheduler"):
        if path.suffix == ".lua":
            text = path.read_text()
            assert "loadstring" not in text
            assert "load(" not in text


def test_msgpack_makes_plain_values_only() -> None:
    """Whoever unpacks takes no hook: extension types stay values, which a stored job may not hold."""
    for path, tree in product():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and named(node.func).endswith("unpackb"):
                assert {word.arg for word in node.keywords} <= {"strict_map_key"}, path
