"""The scripts that start ranks, with stand-ins for srun, torchrun and mpirun that start local processes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "launch"
TINY = (
    "--model n_layer=1,n_head=2,n_embd=16,vocab_size=256,max_seq_len=32 --batch 1 --seq 16 --threads 1 --device cpu "
    "--accumulate 2 --steps 3 --val-every 0 --sample-every 0 --sample-tokens 0"
).split()

# Start the same command twice, each with the variables of its launcher, and end with the largest code, as srun does.
TWO = """#!/usr/bin/env bash
echo "$0 $*" >> {folder}/calls
while [[ ${{1:-}} == -* ]]; do
    [[ $1 == -x ]] && export "${{2?}}"
    case $1 in --*=*|--no-python) shift ;; *) shift 2 ;; esac
done
for rank in 0 1; do
    env {vars} "$@" < /dev/null & ranks[rank]=$!
done
code=0
for rank in 0 1; do wait "${{ranks[rank]}}"; got=$?; ((got > code)) && code=$got; done
exit "$code"
"""
VARS = {
    "srun": "SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost",
    "torchrun": "RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=$PORT",
    "mpirun": "OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Place:
    """A folder with stand-ins that record how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "IRONHORSE": os.environ["IRONHORSE_BIN"],
            "PORT": str(free_port()),
            "MASTER_PORT": str(free_port()),
            "SLURM_JOB_ID": "41",
        }
        for name, variables in VARS.items():
            self.script(name, TWO.format(folder=folder, vars=variables))
        self.script("scontrol", f'#!/bin/sh\necho "$0 $*" >> {folder}/calls\n')

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, script: str, *line: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPTS / script), *line],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def calls(self) -> str:
        file = self.folder / "calls"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*") if path.suffix != ".yaml"))
def test_bash_reads_it(script: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)


@pytest.mark.parametrize(("script", "before"), [("slurm.sbatch", []), ("torchrun.sh", []), ("mpirun.sh", ["2"])])
def test_two_ranks_train(place: Place, script: str, before: list[str]) -> None:
    done = place.run(script, *before, *TINY, "--out", "run", GPUS="2")
    assert done.returncode == 0, done.stderr
    assert (place.folder / "run/checkpoints/step-000003").is_dir()
    assert (place.folder / "run/ranks/rank-1.log").exists()
    assert "requeue" not in place.calls()


def fails_with(place: Place, code: int, saves: bool) -> None:
    """Puts a program in the place of ironhorse that ends with this code."""
    save = 'mkdir -p "run/checkpoints/step-00000$RANDOM"' if saves else ":"
    place.script("train", f"#!/usr/bin/env bash\n{save}\nexit {code}\n")
    place.env["IRONHORSE"] = str(place.folder / "train")


@pytest.mark.parametrize(
    ("code", "saves", "restarts", "queued"),
    [
        (0, True, "0", False),
        (3, True, "9", True),
        (137, True, "9", True),  # a rank was killed, or its node lost
        (137, False, "0", True),
        (3, False, "3", False),  # nothing new was saved for the fourth time
        (2, False, "0", False),  # refused: another try would be, too
        (1, True, "0", False),  # diverged
    ],
)
def test_slurm_queues_again_what_can_go_on(place: Place, code: int, saves: bool, restarts: str, queued: bool) -> None:
    fails_with(place, code, saves)
    done = place.run("slurm.sbatch", "--out", "run", SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 41" in place.calls()) == queued


def test_slurm_resumes_a_run_that_has_begun(place: Place) -> None:
    assert place.run("slurm.sbatch", *TINY, "--out", "run").returncode == 0
    (place.folder / "calls").unlink()
    assert place.run("slurm.sbatch", *TINY, "--out", "run").returncode == 0
    assert "train --resume run --max-time" in place.calls()
    assert "srun --kill-on-bad-exit=0 --wait=120 " in place.calls()
    assert place.run("slurm.sbatch", *TINY).returncode == 2, "without --out"


def test_slurm_begins_again_what_was_lost_before_its_first_checkpoint(place: Place) -> None:
    assert place.run("slurm.sbatch", *TINY, "--out", "run").returncode == 0
    shutil.rmtree(place.folder / "run/checkpoints")
    done = place.run("slurm.sbatch", *TINY, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "--out run --overwrite --max-time" in place.calls()
    assert (place.folder / "run/checkpoints/step-000003").is_dir()


def test_the_jobset_begins_again_what_was_lost_before_its_first_checkpoint(place: Place) -> None:
    """The script of the pod, with a folder of this machine and a stand-in that only records its call."""
    text = yaml.safe_load((SCRIPTS / "jobset.yaml").read_text())
    [part] = text["spec"]["replicatedJobs"]
    [container] = part["template"]["spec"]["template"]["spec"]["containers"]
    script = container["args"][0].replace("/shared", str(place.folder))
    place.script("torchrun", f'#!/bin/sh\necho "$*" >> {place.folder}/calls\n')
    env = {**place.env, "NODE_RANK": "0", "MASTER_ADDR": "localhost"}

    def call() -> str:
        (place.folder / "calls").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", script], env=env, check=True)
        return place.calls()

    run = place.folder / "runs/a"
    assert "--resume" not in call() and "--overwrite" not in call()
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    assert f"--out {run} --overwrite" in call()
    (run / "checkpoints/step-000003").mkdir(parents=True)
    assert f"ironhorse train --resume {run}" in call()


@pytest.mark.parametrize(("script", "before"), [("slurm.sbatch", []), ("torchrun.sh", []), ("mpirun.sh", ["2"])])
def test_every_start_has_a_token_of_its_own(place: Place, script: str, before: list[str]) -> None:
    tokens = []
    for _ in range(2):
        place.script("train", f'#!/bin/sh\necho "$IRONHORSE_TOKEN" > {place.folder}/token\n')
        place.env["IRONHORSE"] = str(place.folder / "train")
        assert place.run(script, *before, "--out", "run", GPUS="2").returncode == 0
        tokens.append((place.folder / "token").read_text().strip())
    assert len(tokens[0]) == 32
    assert tokens[0] != tokens[1]
    assert tokens[0] not in place.calls(), "others can see command lines"


def test_the_jobset_is_one() -> None:
    text = (SCRIPTS / "jobset.yaml").read_text()
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, [part] = job["metadata"]["name"], job["spec"]["replicatedJobs"]
    spec = part["template"]["spec"]
    pods = spec["parallelism"]
    assert pods == spec["completions"]
    assert spec["completionMode"] == "Indexed", "the index is the number of the node"
    [container] = spec["template"]["spec"]["containers"]
    script = container["args"][0]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    asked = {flag: int(value) for flag, value in re.findall(r"--(nnodes|nproc-per-node|accumulate) (\d+)", script)}
    assert (asked["nnodes"], asked["nproc-per-node"]) == (pods, gpus)
    assert asked["accumulate"] % (pods * gpus) == 0
    # the name of the first pod: JobSet, job, its number, its index, and the service of the JobSet
    env = {entry["name"]: entry for entry in container["env"]}
    assert env["MASTER_ADDR"]["value"] == f"{name}-{part['name']}-0-0.{name}"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
