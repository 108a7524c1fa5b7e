"""The installed package: what is in it, its command, its types."""

from __future__ import annotations

import ast
import inspect
import pickle
import pydoc
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import ironhorse
import numpy as np
import pytest
from ironhorse import _native, ops

PACKAGE = Path(ironhorse.__file__).parent


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120)


def stubs() -> dict[str, ast.FunctionDef]:
    tree = ast.parse((PACKAGE / "_native.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_is_installed():
    packages = ("formats", "nn", "ops", "reference", "torch")
    for name in ("py.typed", "_native.pyi", "ops/__init__.pyi", *(f"{package}/__init__.py" for package in packages)):
        assert resources.files("ironhorse").joinpath(name).is_file(), name
    assert metadata.version("ironhorse") == ironhorse.__version__ == _native.__version__
    required = [line for line in metadata.requires("ironhorse") or [] if "extra" not in line]
    assert [line.split(">")[0] for line in required] == ["numpy"]
    (script,) = [entry for entry in metadata.entry_points(group="console_scripts") if entry.name == "ironhorse"]
    assert script.value == "ironhorse._command:main"


def ops_stubs() -> dict[str, list[ast.FunctionDef]]:
    """Every overload of each function of ironhorse.ops."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.parse((PACKAGE / "ops/__init__.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found[node.targets[0].id] = found[node.value.id]  # a second name of a function
    return found


def test_the_stub_says_what_is_there():
    functions = {name for name, thing in vars(_native).items() if inspect.isroutine(thing)}
    assert functions == set(stubs())
    for name, node in stubs().items():
        there = inspect.signature(getattr(_native, name)).parameters
        keywords = [argument.arg for argument in node.args.kwonlyargs]
        arguments = [*node.args.posonlyargs, *node.args.args]
        if keywords:  # a layer op of the table: outputs and sizes are not used, and so not in the stub
            names = {*(argument.arg for argument in arguments), *keywords}
            assert names <= set(there) and "device" in names, name
            continue
        assert [argument.arg for argument in arguments] == list(there), name
        optional = [parameter for parameter in there.values() if parameter.default is not parameter.empty]
        assert len(node.args.defaults) == len(optional) and node.returns is not None, name
        assert all(argument.annotation is not None for argument in arguments), name


def test_ops_are_typed_and_documented():
    assert set(ops_stubs()) == set(_native.OPS) and set(_native.OPS) <= set(ops.__all__)
    for name, function in _native.OPS.items():
        assert getattr(ops, name) is function and function.__name__ == name
        there = inspect.signature(function).parameters
        node = ops_stubs()[name][-1]  # of several overloads the last is the whole one
        positional, keywords = node.args.args, node.args.kwonlyargs
        assert [argument.arg for argument in (*positional, *keywords)] == list(there), name
        assert [parameter.name for parameter in there.values() if parameter.kind is parameter.KEYWORD_ONLY] == [
            argument.arg for argument in keywords
        ]
        for argument, default in zip(positional[::-1], node.args.defaults[::-1], strict=False):
            assert there[argument.arg].default == ast.literal_eval(default), (name, argument.arg)
        assert there["device"].default == "auto" and node.returns is not None, name
        for word in ("Arguments:", "Returns:", "Example:", "device"):
            assert word in function.__doc__, (name, word)


def test_ops_are_functions_of_their_module():
    for name, function in _native.OPS.items():
        assert (function.__module__, function.__name__, function.__qualname__) == ("ironhorse.ops", name, name)
        assert inspect.isbuiltin(function) and inspect.ismodule(function.__self__)
        assert pickle.loads(pickle.dumps(function)) is function
        assert inspect.getdoc(function) and pydoc.render_doc(function, renderer=pydoc.plaintext).startswith(
            f"Python Library Documentation: built-in function {name} in module ironhorse.ops"
        )
    assert ops.flash_attention is not ops.attention and ops.aux_loss is not ops.aux_loss_forward


def test_keywords_need_not_be_interned():
    x, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    name = "".join(["o", "u", "t"])
    assert ops.silu(x, **{name: out}) is out and (out > 0).all()
    with pytest.raises(TypeError, match=r"silu\(\) got an unexpected keyword argument 'tuo'"):
        ops.silu(x, **{name[::-1]: out})


def test_the_examples_of_the_documentation_run():
    for name, function in _native.OPS.items():
        example = function.__doc__.partition("Example:")[2].strip()
        result = eval(example, {"np": np, "ops": ops})
        arrays = result if isinstance(result, tuple) else (result,)
        assert all(isinstance(array, np.ndarray) for array in arrays), name


def test_what_a_user_sees():
    seen = [name for name in dir(ironhorse) if not name.startswith("__")]
    assert seen == ["Code", "IronhorseError", "Model", "export", "jit", "load", "nn", "ops", "save", "torch", "verify"]
    version = python("-m", "ironhorse", "--version")
    assert (version.returncode, version.stdout.strip()) == (0, f"ironhorse {ironhorse.__version__}")


def test_importing_needs_neither_torch_nor_numpy():
    hide = "import sys; sys.modules['torch'] = None; "
    assert python("-c", hide + "import ironhorse, ironhorse.config; print(ironhorse.ops.silu)").returncode == 0
    light = python("-c", "import sys, ironhorse; print('numpy' in sys.modules, 'torch' in sys.modules)")
    assert light.stdout.split() == ["False", "False"]


def test_the_command():
    version = python("-m", "ironhorse._command", "--version")
    assert (version.returncode, version.stdout.strip()) == (0, f"ironhorse {ironhorse.__version__}")
    wrong = python("-m", "ironhorse._command", "train", "--no-such-flag")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and "--no-such-flag" in wrong.stderr
    bare = python("-m", "ironhorse._command")
    assert bare.returncode == 2 and "Usage: ironhorse" in bare.stderr
    script = Path(sys.executable).parent / "ironhorse"
    if script.exists():
        ran = subprocess.run([script, "doctor"], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0 and ran.stdout


def test_the_command_stops_and_resumes_training():
    """`resume-check` starts this interpreter again, stops it by SIGTERM, kills it, and resumes."""
    sizes = "n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32"
    flags = ["--model", sizes, "--batch", "2", "--seq", "16", "--val-batches", "4", "--steps", "60", "--device", "cpu"]
    done = python("-m", "ironhorse._command", "resume-check", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGTERM" in done.stdout and "SIGKILL" in done.stdout and "PASS" in done.stdout


def test_the_command_in_this_process_returns(capfd: pytest.CaptureFixture[str]):
    assert _native.command(["ironhorse", "--version"]) == 0
    assert capfd.readouterr().out.startswith("ironhorse ")
    assert _native.command(["ironhorse", "verify", "no-such-file.bin"]) == 2


def test_export_is_there():
    assert python("-m", "ironhorse.export", "--help").returncode == 0


def test_the_guide(capsys: pytest.CaptureFixture[str]):
    """Runs the examples of docs/python.md, some of which need torch."""
    import doctest

    pytest.importorskip("torch")

    guide = Path(__file__).parents[2] / "docs" / "python.md"
    result = doctest.testfile(str(guide), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 10 and result.failed == 0, capsys.readouterr().out
