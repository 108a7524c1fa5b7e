"""The script of the GPU bundle, with stand-ins for ironhorse, PyTorch and compute-sanitizer: no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers every command as the real one would; a file named `break-WORD` beside it makes that command wrong.
IRONHORSE = """#!{python} -IS
import json, pathlib, sys
here = pathlib.Path(sys.argv[0]).parent
with open(here / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
command, line = sys.argv[1], sys.argv[2:]
value = lambda flag: line[line.index(flag) + 1] if flag in line else None
broken = lambda word: (here / ("break-" + word)).exists()
report = dict(
    doctor=dict(devices=[dict(device="cpu", why="x"), dict(device="cuda:0", why="NVIDIA H200, 139 GiB")]),
    selftest=dict(passed=926, failed=0),
    verify=dict(verdict="pass", first_wrong=None, tensors=[dict()] * 7),
    profile=dict(ms=105.5, by_kind=[dict(name="gelu", ms=3.0), dict(name="matmul", ms=70.25)]),
).get(command)
if command == "bench":
    tokens = int(value("--batch")) * int(value("--seq"))
    rate = 600000 if "--fast" in line else 580000
    losses = [4.0, 3.5] if not ("--no-graphs" in line and broken("graphs")) else [4.0, 3.5000002]
    report = dict(tokens_per_s=rate, ms_per_step=1e3 * tokens / rate, peak_bytes=20 * 2**30, loss=3.5, losses=losses)
if command == "verify" and "bf16" in line and broken("verify"):
    report.update(verdict="fail", first_wrong=dict(op="gelu_fwd", tensor="act.h.0.gelu", index=[0, 3]))
if command == "train":
    run = pathlib.Path(value("--out"))
    run.mkdir(parents=True)
    losses = [7 - 6 * i / 299 for i in range(int(value("--steps")))]
    if broken("train") and "--init" not in line:
        losses[40] = None
    steps = [dict(step=i, loss=loss) for i, loss in enumerate(losses)]
    ended = 2.5 if "--init" in line and broken("init") else 2.0
    steps[0]["val_loss"], steps[-1]["val_loss"] = ended if "--init" in line else 7.0, ended
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\\n" for step in steps))
    report = dict()
if command == "generate":
    tokens = list(range(int(value("--tokens"))))
    if value("--device") == "cpu" and broken("generate"):
        tokens[17] = 99
    report = dict(tokens=tokens)
if command == "doctor" and broken("doctor"):
    print("error: no driver")
    sys.exit(2)
if value("--json"):
    pathlib.Path(value("--json")).write_text(json.dumps(report))
if value("--trace"):
    pathlib.Path(value("--trace")).write_text("[]")
sys.exit(1 if report.get("first_wrong") else 0)
"""

TORCH = """
import json, pathlib, sys
line = sys.argv[1:]
if "--compile-only" not in line:
    report = dict(tokens_per_s=500000, ms_per_step=131.0, peak_bytes=28 * 2**30, loss=3.6, sdpa="cudnn", mode="default")
    pathlib.Path(line[line.index("--json") + 1]).write_text(json.dumps(report))
"""

SANITIZER = """#!/bin/sh
echo "========= ERROR SUMMARY: 0 errors"
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "a bundle"  # paths may have spaces
    (folder / "keys").mkdir(parents=True)
    for file in (ROOT / "scripts" / "gpu").iterdir():
        shutil.copy(file, folder)
    script(folder / "ironhorse", IRONHORSE.format(python=sys.executable))
    (folder / "gpu_torch.py").write_text(TORCH)
    (folder / "keys" / "odd.key.safetensors").write_text("")
    (folder / "bin").mkdir()
    script(folder / "bin" / "compute-sanitizer", SANITIZER)
    script(folder / "bin" / "nvidia-smi", "#!/bin/sh\n")
    (folder / "scratch" / "keys").mkdir(parents=True)
    (folder / "scratch" / "keys" / "wide_custom.key.safetensors").write_text("")  # or it would be exported
    return folder


def run(bundle: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{bundle / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "IRONHORSE_SCRATCH": str(bundle / "scratch"),
        **variables,
    }
    environment.pop("IRONHORSE_BIN", None)
    command = ["bash", str(bundle / "run.sh"), "--out", str(bundle / "out"), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


def summary(bundle: Path) -> dict:
    return json.loads((bundle / "out" / "summary.json").read_text())


def test_everything_passes_and_makes_one_table(bundle: Path):
    done = run(bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    report = summary(bundle)
    figures = {part["name"]: part["figure"] for part in report["parts"]}
    assert all(part["status"] == "ok" for part in report["parts"])
    assert figures["doctor"] == "NVIDIA H200, 139 GiB"
    assert figures["selftest"] == "926 passed, 0 failed"
    assert figures["verify-odd-bf16"] == figures["lockstep-wide-bf16"] == "7 tensors agree"
    narrow = {name for name in figures if name.startswith("verify-") and "fp8" in name}
    assert narrow == {"verify-wide-fp8", "verify-wide-fp8-head"}, "sizes of the other key stay in bf16"
    assert figures["determinism"] == "2 losses equal in 3 runs"
    assert figures["profile"] == "105.5 ms: matmul 70.2, gelu 3.0"
    assert figures["sanitizer-racecheck"] == "0 errors"
    rows = {f"{row['model']}-{row['batch']}-{row['dtype']}": row for row in report["bench"]}
    assert list(rows) == ["d12-64-bf16", "d12-4-bf16", "d24-32-bf16", "d48-16-bf16", "d12-64-tf32", "d12-64-f32"]
    assert rows["d12-64-bf16"]["default_ratio"] == pytest.approx(1.16)
    assert rows["d12-64-bf16"]["fast_ratio"] == pytest.approx(1.2)
    assert rows["d48-16-bf16"]["torch_tokens_per_s"] is None
    row = "d12 B=64 bf16      580,000   600,000   500,000   1.160  1.200    20.0   28.0  default, cudnn"
    assert row in done.stdout and row in (bundle / "out" / "table.txt").read_text()
    calls = (bundle / "calls").read_text()
    assert "verify --lockstep --key" in calls and "--attention own" in calls and "--no-graphs" in calls
    assert sorted(path.name for path in (bundle / "out").iterdir()) == [
        "logs.tar.gz", "summary.json", "table.txt", "trace.json"]  # fmt: skip
    with tarfile.open(bundle / "out" / "logs.tar.gz") as logs:
        assert {"./doctor.log", "./bench-d12-b64-bf16.json"} <= set(logs.getnames())


def test_a_failure_stops_nothing_and_is_named(bundle: Path):
    for word in ("doctor", "graphs", "verify"):
        (bundle / f"break-{word}").touch()
    done = run(bundle, "--quick")
    assert done.returncode == 1
    parts = {part["name"]: part for part in summary(bundle)["parts"]}
    assert parts["doctor"]["status"] == "failed(2)"
    assert "    | error: no driver" in done.stdout
    assert parts["determinism"]["figure"] == "determinism-nographs differs"
    assert parts["verify-odd-bf16"]["figure"] == "first wrong: gelu_fwd act.h.0.gelu at [0, 3]"
    assert parts["verify-odd-f32"]["status"] == parts["bench-d12-b64-bf16"]["status"] == "ok"
    assert "failed: doctor, verify-odd-bf16" in done.stdout
    assert not any("wide" in name or "sanitizer" in name for name in parts), "--quick is short"


def test_some_stages_only(bundle: Path):
    assert run(bundle, "--only", "bench", "--bench", "d12-b4", "--no-torch").returncode == 0
    assert [part["name"] for part in summary(bundle)["parts"]] == ["bench-d12-b4-bf16", "bench-d12-b4-bf16-fast"]
    assert run(bundle, "--only", "table", "--rows", "d12-b4,d12-b64-fp8", "--no-torch").returncode == 0
    assert [part["name"] for part in summary(bundle)["parts"]] == ["bench-d12-b64-fp8", "bench-d12-b4", "table-rows"]
    assert run(bundle, "--only", "doctor,selftest").returncode == 0
    assert [part["name"] for part in summary(bundle)["parts"]] == ["doctor", "nvidia-smi", "selftest"]


MOE_KEYS = "tiny odd all one large llama token three idle gqa single mixtral theirs".split()


@pytest.fixture
def moe_bundle(bundle: Path) -> Path:
    (bundle / "benches").mkdir()
    (bundle / "benches" / "gpu_torch_moe.py").write_text(TORCH)
    (bundle / "benches" / "moe_experts.py").write_text("")
    keys = bundle / "scratch" / "moe"  # or they would be exported
    keys.mkdir()
    for name in MOE_KEYS:
        (keys / f"{name}.key.safetensors").write_text("")
    return bundle


def test_mixtures_of_experts_have_a_call_of_their_own(moe_bundle: Path):
    done = run(moe_bundle, "--only", "moe")
    assert done.returncode == 0, done.stdout + done.stderr
    report = summary(moe_bundle)
    parts = {part["name"]: part for part in report["parts"]}
    assert all(part["status"] == "ok" for part in parts.values())
    verified = {f"verify-moe-{name}-{dtype}" for name in MOE_KEYS for dtype in ("f32", "bf16")}
    verified |= {"verify-moe-all-fp8", "verify-moe-large-fp8"}
    assert {name for name in parts if name.startswith("verify-moe-")} == verified
    for name in ("f32", "bf16", "all16"):
        assert parts[f"check-moe-{name}-loss"]["figure"] == "passed: loss 6.9097 to 1.0903 in 300 steps"
        assert parts[f"check-moe-{name}-on"]["figure"].startswith("passed: validation loss 2.000000")
        assert parts[f"check-moe-{name}-drawn"]["figure"] == "passed: 200 tokens equal"
    assert parts["check-moe-f32-cpu"]["figure"] == "passed: 200 tokens equal"
    rows = {f"{row['model']}-{row['batch']}-{row['dtype']}": row for row in report["bench"]}
    assert list(rows) == ["moe8-16-bf16", "moe8-16-all16", "moe30-20-all16"]
    assert rows["moe8-16-bf16"]["default_ratio"] == rows["moe8-16-all16"]["default_ratio"] == pytest.approx(1.16)
    calls = (moe_bundle / "calls").read_text()
    assert "--master residual --moments bf16 --recompute gelu" in calls and "verify --lockstep" in calls
    assert "train --device cuda --dtype bf16 --master residual --moments bf16" in calls


def test_a_mixture_that_trains_wrongly_is_named(moe_bundle: Path):
    for word in ("train", "init", "generate"):
        (moe_bundle / f"break-{word}").touch()
    assert run(moe_bundle, "--only", "moe", "--quick").returncode == 1
    parts = {part["name"]: part for part in summary(moe_bundle)["parts"]}
    assert parts["check-moe-f32-loss"]["figure"] == "failed: 300 losses, not finite at steps [40]"
    assert parts["check-moe-f32-on"]["figure"].startswith("failed: validation loss 2.000000, after loading 2.500000")
    different = "failed: token 17 of 200 is 17 in text-moe-f32-greedy, 99 in text-moe-f32-cpu"
    assert parts["check-moe-f32-cpu"]["figure"] == different
    assert not any(name.startswith("bench") for name in parts), "--quick is short"


def test_what_a_machine_lacks_is_said(moe_bundle: Path):
    python = moe_bundle / "bin" / "python"  # one without transformers
    script(python, f"""#!/bin/sh\n[ "$3" = transformers ] && exit 1\nexec {sys.executable} "$@"\n""")
    (moe_bundle / "scratch" / "moe" / "mixtral.key.safetensors").unlink()
    done = run(moe_bundle, "--only", "moe", "--quick", PYTHON=str(python), IRONHORSE_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {part["name"]: part for part in summary(moe_bundle)["parts"]}
    for name in ("export-moe-mixtral", "verify-moe-mixtral-f32", "verify-moe-mixtral-bf16"):
        assert (parts[name]["status"], parts[name]["figure"]) == ("absent", "skipped: no transformers")
    assert parts["verify-moe-theirs-f32"]["status"] == "ok"
    for name in ("verify-moe-tiny-bf16", "lockstep-moe-tiny-bf16", "train-moe-bf16", "train-moe-all16"):
        assert parts[name]["figure"] == "skipped: the CPU has no weights in bf16"
    absent = sum(part["status"] == "absent" for part in parts.values())
    assert f"{len(parts) - absent} passed, 0 failed, {absent} skipped" in done.stdout
    assert "--device cuda" not in (moe_bundle / "calls").read_text()


def test_time_that_is_spent_leaves_parts_out(bundle: Path):
    assert run(bundle, "--only", "doctor", "--budget", "0").returncode == 1
    assert summary(bundle)["parts"][0]["status"] == "no-time"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--only", "tests"], "error: unknown stage 'tests'; expected one of doctor selftest"),
        (["--bench", "d13"], "error: there is no benchmark 'd13'; there are d12-b64"),
        (["--only", "table", "--rows", "d13"], "error: there is no row 'd13'; there are d12-b64"),
        (["--budget", "x"], "error: --budget is 'x', expected seconds"),
        (["--fast"], "error: unknown argument '--fast'"),
    ],
)
def test_wrong_flags_are_refused(bundle: Path, flags: list[str], error: str):
    done = run(bundle, *flags)
    assert done.returncode == 2 and done.stderr.startswith(error)
    assert not (bundle / "calls").exists()


def test_a_comparison_that_cannot_start_is_refused_before_it_is_half_done(bundle: Path):
    python = bundle / "bin" / "bare"
    script(python, f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without installed packages
    done = run(bundle, "--only", "table", PYTHON=str(python))
    assert done.returncode == 2 and "error: PyTorch's side needs the folder python beside this script" in done.stderr
    assert not (bundle / "calls").exists()


def test_the_torch_side_runs_without_a_gpu(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("gpu_torch", ROOT / "benches" / "gpu_torch.py")
    gpu_torch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_torch)
    model = "n_layer=1,n_head=2,n_embd=16,vocab_size=50,max_seq_len=8"
    shape = ["--model", model, "--batch", "2", "--seq", "8", "--steps", "2", "--seconds", "0", "--warmup", "0"]
    for recipe in ("autocast", "bf16"):
        flags = ["--device", "cpu", "--mode", "eager", "--recipe", recipe, "--json", str(tmp_path / "t.json")]
        assert gpu_torch.main([*shape, *flags]) == 0
        report = json.loads((tmp_path / "t.json").read_text())
        assert report["tokens_per_s"] == pytest.approx(16e3 / report["ms_per_step"])
        assert report["first_loss"] == pytest.approx(4.8, abs=0.3)  # ln 128: the padded vocabulary
        assert report["sdpa"] == "any" and len(report["runs"]) == 1


def test_rows_of_the_table_are_compared_with_pytorch_and_fp8_with_bf16(tmp_path: Path):
    for name, rate in {"bench-d12-b64": 600.0, "bench-d12-b64-fp8-head": 780.0, "torch-d12-b64": 500.0}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"tokens_per_s": rate, "peak_bytes": 2**30}))
    command = [sys.executable, ROOT / "scripts" / "gpu" / "table.py", tmp_path, "--json", tmp_path / "rows.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| d12-b64 | 600 tokens/s | 500 | 1.20× | 1.0 GiB | 1.0 GiB |" in done.stdout
    assert "| d12-b64-fp8-head | 780 tokens/s |  | 1.30× ours in bf16 | 1.0 GiB |  |" in done.stdout
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert rows["d12-b64"]["ratio"] == 1.2 and rows["d12-b64-fp8-head"]["bf16_ratio"] == 1.3
