"""Dependencies between source folders have no cycle, and LIBRARY and APPLICATION allow each of them.

A "room" is a component of the project, such as gemm, with folders in csrc, cuda and python/shoestring. It
depends on another room if it includes headers or imports modules of that room.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from build_folder import REPOSITORY

# The library's rooms (top-level source folders such as csrc/gemm), and the rooms that each may use. A room is
# listed after all rooms that it uses.
LIBRARY: dict[str, tuple[str, ...]] = {
    "core": (),
    "files": ("core",),
    "gemm": ("core",),
    "quantization": ("core", "files", "gemm"),
    "layers": ("core",),
    "adapters": ("core", "files", "gemm", "layers", "quantization"),
    "attention": ("core", "gemm", "layers"),
    "losses": ("core", "gemm", "quantization"),
    "blocks": ("adapters", "attention", "core", "gemm", "layers"),
    "offload": ("core", "quantization"),
    "optim": ("core", "files", "gemm", "offload", "quantization"),
    "checkpoint": ("core", "losses", "offload", "quantization"),
    "experts": ("adapters", "blocks", "checkpoint", "core", "gemm", "layers", "quantization"),
    "integrations": (
        "adapters",
        "attention",
        "checkpoint",
        "core",
        "experts",
        "files",
        "gemm",
        "layers",
        "losses",
        "quantization",
    ),
    "data": ("core", "files", "offload"),
    "runs": ("core", "files", "optim"),
    "distributed": ("checkpoint", "core", "files", "offload", "optim", "quantization", "runs"),
    "planning": ("adapters", "checkpoint", "core", "distributed", "files", "optim", "quantization"),
}
# Rooms (source folders) of the command-line application. They may use every room of the library, and no room
# of the library uses them.
APPLICATION: dict[str, tuple[str, ...]] = {
    "training": (*LIBRARY,),
    "cli": (*LIBRARY, "training"),
}
ROOMS = LIBRARY | APPLICATION
# The folders of training, and those that each may use. "" holds the files that the others share.
TRAINING: dict[str, tuple[str, ...]] = {
    "": (),
    "report": (),
    "estimate": ("",),
    "run": ("", "estimate", "report"),
}
# The folders of csrc/optim, and those that each may use. "" holds what the operators of all rules share.
OPTIM: dict[str, tuple[str, ...]] = {
    "split": (),
    "": (),
    "core": ("", "split"),
    "rules": ("", "core", "split"),
    "wrappers": ("", "core", "split"),
}

# Installed headers that only include others. All other headers are in the folders of their rooms.
COLLECTIONS = {"nn.h", "ops.h", "optim.h", "shoestring.h"}
# Python modules that belong to no room (folder such as python/shoestring/gemm). PUBLIC modules only collect
# public names, and _load loads the C++ libraries.
PUBLIC = {"", "_public", "__main__", "callbacks", "diffusion", "lora", "nn", "ops"}
CORE_MODULES = {"_load"}

Edges = dict[str, set[str]]


def cpp_files() -> list[str]:
    folders = [REPOSITORY / "csrc", REPOSITORY / "cuda"]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    return sorted(str(path.relative_to(REPOSITORY)) for path in paths)


def includes(files: Iterable[str]) -> Edges:
    """Return for each C++ or CUDA file the files of this repository that it includes."""
    known = set(files)
    edges: Edges = {}
    for file in known:
        edges[file] = set()
        for name in re.findall(r'^#include ["<]([^">]+)[">]', (REPOSITORY / file).read_text(), re.M):
            found = [path for path in (f"csrc/{name}", f"csrc/include/{name}", name) if path in known]
            assert name[0] == "<" or found or "/" not in name or name.split("/")[0] not in ROOMS, (file, name)
            edges[file] |= set(found[:1])
    return edges


def cpp_room(file: str) -> str | None:
    """Return the room (source folder) of a C++ or CUDA file; None for a header that only includes headers."""
    header = file.removeprefix("csrc/include/shoestring/")
    if header == file:
        return file.split("/")[1]
    return None if header in COLLECTIONS else header.split("/")[0]


def python_modules() -> dict[str, Path]:
    root = REPOSITORY / "python/shoestring"
    paths = list(root.rglob("*.py"))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").strip("."): path
        for path in paths
    }


def imports(modules: dict[str, Path], everywhere: bool) -> Edges:
    """Return the shoestring modules that each module imports, also inside functions if ``everywhere``."""
    edges: Edges = {}

    def visit(module: str, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.ImportFrom)
                and child.module
                and child.module.split(".")[0] == "shoestring"
            ):
                base = child.module.removeprefix("shoestring").strip(".")
                for alias in child.names:
                    full = f"{base}.{alias.name}".strip(".")
                    edges[module].add(full if full in modules else base)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == "shoestring":
                        edges[module].add(alias.name.removeprefix("shoestring").strip("."))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                if everywhere:
                    visit(module, child)
            elif everywhere or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(module, child)

    for module, path in modules.items():
        edges[module] = set()
        visit(module, ast.parse(path.read_text()))
    return edges


def python_room(module: str) -> str | None:
    if module in CORE_MODULES:
        return "core"
    return None if module in PUBLIC else module.split(".")[0]


def circle(edges: Edges) -> list[str]:
    """Return the nodes of one cycle in the dependency graph, or an empty list if there is none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(edges.get(node, ())):
            if found := search(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := search(node, []))), [])


def test_the_list_of_rooms_points_one_way() -> None:
    names = list(ROOMS)
    for room, used in ROOMS.items():
        assert list(used) == sorted(used) or room in APPLICATION, f"{room}: keep the list sorted"
        late = [other for other in used if names.index(other) >= names.index(room)]
        assert not late, f"{room} uses {late}, which stand after it"
    assert not any(set(used) & set(APPLICATION) for used in LIBRARY.values())


def test_every_folder_is_a_room() -> None:
    others = {"csrc": {"include"}, "tests/python": {"examples", "scripts"}, "benchmarks": {"results", "step"}}
    for floor in ("csrc", "cuda", "python/shoestring", "tests/cpp", "tests/python", "benchmarks"):
        ignored = {"lib", "include", "share", "__pycache__", *others.get(floor, ())}
        folders = {path.name for path in (REPOSITORY / floor).iterdir() if path.is_dir()} - ignored
        assert folders <= set(ROOMS), f"{floor}: {sorted(folders - set(ROOMS))} are not rooms"


def test_includes_follow_the_list() -> None:
    files = cpp_files()
    edges = includes(files)
    wrong = [
        f"{file} includes {target}: {a} may not use {b}"
        for file in files
        for target in sorted(edges[file])
        if (a := cpp_room(file)) and (b := cpp_room(target)) and a != b and b not in ROOMS[a]
    ]
    assert not wrong, "\n".join(wrong)
    assert not (found := circle(edges)), " -> ".join(found)


def test_imports_follow_the_list() -> None:
    modules = python_modules()
    wrong = [
        f"{module} imports {target}: {a} may not use {b}"
        for module, targets in sorted(imports(modules, everywhere=True).items())
        for target in sorted(targets)
        if (a := python_room(module)) and (b := python_room(target)) and a != b and b not in ROOMS[a]
    ]
    assert not wrong, "\n".join(wrong)
    assert not (found := circle(imports(modules, everywhere=False))), " -> ".join(found)


def training_folder(module: str) -> str | None:
    """Return the folder of a module of training; None for a module of another room."""
    room, *folder, _ = module.split(".") if "." in module else (module, "")
    return None if room != "training" else folder[0] if folder else ""


def assert_folders(
    allowed: dict[str, tuple[str, ...]], edges: Edges, folder_of: Callable[[str], str | None]
) -> None:
    """Assert that the folders of a room use each other as ``allowed`` says, no more and no less."""
    used: dict[str, set[str]] = {folder: set() for folder in allowed}
    for node, targets in edges.items():
        if (folder := folder_of(node)) is not None:
            used[folder] |= {to for target in targets if (to := folder_of(target)) is not None}
    assert {folder: found - {folder} for folder, found in used.items()} == {
        folder: set(targets) for folder, targets in allowed.items()
    }


def test_folders_of_training_follow_the_list() -> None:
    assert_folders(TRAINING, imports(python_modules(), everywhere=True), training_folder)


def optim_folder(file: str) -> str | None:
    """Return the folder of a file of csrc/optim; None for another file."""
    inside = file.removeprefix("csrc/optim/")
    return None if inside == file else inside.rpartition("/")[0]


def test_folders_of_optim_follow_the_list() -> None:
    assert_folders(OPTIM, includes(cpp_files()), optim_folder)


def test_every_arrow_is_used() -> None:
    """LIBRARY lists no dependency between source folders that neither C++ nor Python uses any more."""
    used: set[tuple[str | None, str | None]] = set()
    for node, targets in includes(cpp_files()).items():
        used |= {(cpp_room(node), cpp_room(target)) for target in targets}
    for node, targets in imports(python_modules(), everywhere=True).items():
        used |= {(python_room(node), python_room(target)) for target in targets}
    unused = [f"{a} -> {b}" for a, names in LIBRARY.items() for b in names if (a, b) not in used]
    assert not unused, ", ".join(unused)
