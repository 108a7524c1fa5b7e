"""The installed package: what is in it, its command, its types."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import ironhorse
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
    for name in ("py.typed", "_native.pyi", *(f"{package}/__init__.py" for package in packages)):
        assert resources.files("ironhorse").joinpath(name).is_file(), name
    assert metadata.version("ironhorse") == ironhorse.__version__ == _native.__version__
    required = [line for line in metadata.requires("ironhorse") or [] if "extra" not in line]
    assert [line.split(">")[0] for line in required] == ["numpy"]
    (script,) = [entry for entry in metadata.entry_points(group="console_scripts") if entry.name == "ironhorse"]
    assert script.value == "ironhorse._command:main"


def test_the_stub_says_what_is_there():
    functions = {name for name, thing in vars(_native).items() if inspect.isroutine(thing)}
    assert functions == set(stubs())
    for name, node in stubs().items():
        there = inspect.signature(getattr(_native, name)).parameters
        arguments = [*node.args.posonlyargs, *node.args.args]
        assert [argument.arg for argument in arguments] == list(there), name
        first_default = len(arguments) - len(node.args.defaults)
        for i, parameter in enumerate(there.values()):
            assert (parameter.default is not inspect.Parameter.empty) == (i >= first_default), (name, parameter)
            default = parameter.default
            if i >= first_default and default is not Ellipsis:
                assert default == ast.literal_eval(node.args.defaults[i - first_default]), (name, parameter)
            assert arguments[i].annotation is not None, (name, parameter)
        assert node.returns is not None, name


def test_ops_are_typed_documented_and_in_the_order_of_the_native_functions():
    for name in ops.__all__:
        function = getattr(ops, name)
        if not inspect.isfunction(function):
            continue
        assert function.__doc__, name
        parameters = inspect.signature(function).parameters
        native = inspect.signature(getattr(_native, function.__name__)).parameters
        second_names = {"topp_sample": ["top_p"]}.get(name, [])  # keywords of Python's alone
        assert [p for p in parameters if p not in second_names] == list(native), name
        for second in second_names:
            assert parameters[second].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY
        source = ast.parse(inspect.getsource(sys.modules[function.__module__]))
        typed = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__]
        assert typed[0].returns is not None, name
    others = ("torch_", "nn_")  # the parts of ironhorse.torch and ironhorse.nn
    assert {name for name in stubs() if not name.startswith(others)} - {"command", "verify"} <= set(ops.__all__)


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
