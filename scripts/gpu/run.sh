#!/usr/bin/env bash
# Checks and measures ironhorse on a GPU machine, and compares it with PyTorch. Part of the folder that
# `cargo xtask gpu-bundle` makes. Needs an NVIDIA driver and a Python with PyTorch, but neither Rust nor a network.
#
#   bash run.sh                        everything about training, in 8 minutes at most
#   bash run.sh --quick                the checks and one comparison, in 3 minutes at most
#   bash run.sh --only bench           some stages; --bench d12-b64,d12-b4 selects configurations, --no-torch skips PyTorch
#   bash run.sh --only selftest        every case of every op, 8 minutes at most; a run of everything has those of --quick
#   bash run.sh --only rust            the Rust tests that need a GPU; 5 minutes at most
#   bash run.sh --only python,ops      the Python, PyTorch, C and jit ops: their tests, then their speeds; 9 minutes at most
#   bash run.sh --only moe             mixtures of experts: keys, a training run, the 6.9B and its first eight layers; 9 minutes at most;
#                                      with --quick only keys and training, which IRONHORSE_DEVICE=cpu runs without a GPU
#   bash run.sh --only runs            interrupted runs: bitwise equal, killed at random, the cost of saving; 9 minutes at most
#   bash run.sh --only ranks           worlds of 1, 2 and 4 ranks on real NCCL, all on this GPU: the same bits; 9 minutes at most
#   bash run.sh --only data            text as data: the loader beside ready tokens, the time to grade 10,042 questions; 5 minutes at most
#   bash run.sh --only f32             f32 and tf32: attention, keys, profiles, speeds with and without tensor cores; 5 minutes at most
#   bash run.sh --only families        Qwen, Llama, Mistral, Gemma: keys, adapters, preferences, `tune`; 4 minutes at most
#   bash run.sh --only families_bench  their speeds; 9 minutes at most; the PyTorch side needs transformers in PYTHONPATH
#   bash run.sh --only table           the rows of the README's GPU table, each compared with PyTorch; 12 minutes at most;
#                                      --rows d12-b64,d12-b64-fp8 selects some
#   bash run.sh --only compare         IRONHORSE_BEFORE=BINARY: that build and this one, alternating; 5 minutes at most
#   bash run.sh --out results          where to write table.txt, summary.json, trace.json and logs.tar.gz
#
# Every part has its own time limit, log and exit status; after a failure the others still run. A table of all parts follows.
# Exit code: 0 all passed, 1 something failed, 2 could not run.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
stages="doctor selftest verify lockstep determinism rust python ops moe runs ranks data f32 families families_bench table compare bench profile sanitizer startup precision"
quick_stages="doctor selftest verify lockstep determinism bench"
grid="d12-b64 d12-b4 d24-b32 d48-b16"
out=out quick= only= torch=1 budget= chosen= rows=

usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
refuse() {
    echo "error: $*" >&2
    exit 2
}
# member WORD LIST: whether the list, separated by spaces or commas, contains the word
member() { [[ " ${2//,/ } " == *" $1 "* ]]; }

while (($#)); do
    case $1 in
    --quick) quick=1 ;;
    --no-torch) torch= ;;
    --out | --only | --bench | --rows | --budget)
        (($# > 1)) || refuse "$1 needs a value"
        case $1 in
        --out) out=$2 ;;
        --only) only="$only $2" ;;
        --bench) chosen="$chosen $2" ;;
        --rows) rows="$rows $2" ;;
        --budget) budget=$2 ;;
        esac
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) refuse "unknown argument '$1' (see --help)" ;;
    esac
    shift
done
for stage in ${only//,/ }; do
    member "$stage" "$stages" || refuse "unknown stage '$stage'; expected one of $stages"
done
for config in ${chosen//,/ }; do
    member "$config" "$grid" || refuse "there is no benchmark '$config'; there are $grid"
done
[[ $budget =~ ^[0-9]*$ ]] || refuse "--budget is '$budget', expected seconds"
wanted=${only:-$stages}
[[ $quick && ! $only ]] && wanted=$quick_stages
# The default is GPT-2 on the engine; Rust tests, ops, mixtures of experts, runs, ranks, data, f32 and families need a call each with --only.
[[ $only ]] || wanted=${wanted/ rust python ops moe runs ranks data f32 families families_bench table compare/}
[[ $chosen ]] || chosen=$grid
[[ $quick && $chosen == "$grid" ]] && chosen=d12-b64
if [[ $quick ]]; then most=175; elif [[ $only =~ table ]]; then most=700; elif [[ $only =~ ops|moe|runs|ranks|families|compare ]]; then most=540; else most=470; fi
budget=${budget:-$most}

ironhorse=${IRONHORSE_BIN:-$here/ironhorse}
python=${PYTHON:-python3}
[[ -x $ironhorse ]] || chmod +x "$ironhorse" 2>/dev/null || refuse "there is no ironhorse beside this script"
command -v "$python" >/dev/null || refuse "there is no $python; PYTHON=FILE names another"
mkdir -p "$out" && out=$(cd "$out" && pwd) || refuse "--out $out cannot be made"
# Kept between calls: compiled kernels, and keys that are too large for the bundle.
scratch=${IRONHORSE_SCRATCH:-${TMPDIR:-/tmp}/ironhorse-gpu}
export IRONHORSE_CACHE=${IRONHORSE_CACHE:-$scratch/cache}
export PYTHONPATH=$here/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$scratch/keys" || refuse "$scratch cannot be made"
# Told before minutes of measurements that would miss their other side.
if [[ $torch ]] && { member bench "$wanted" || member table "$wanted"; }; then
    "$python" -c 'import ironhorse.config' || refuse "PyTorch's side needs the folder python beside this script; --no-torch leaves it out"
fi
work=$(mktemp -d) || refuse "no temporary folder can be made"
began=$(date +%s)
warm_pid=

left() { echo $((budget - ($(date +%s) - began))); }
json() { echo "$work/$1.json"; }

# record NAME STATUS SECONDS: adds a row to the table and prints a line
record() {
    printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$work/parts.tsv"
    printf '%-26s %-12s %6s s\n' "$1" "$2" "$3"
}

# attempt NAME LIMIT COMMAND...: runs the command with a log and a time limit in seconds; returns its status
attempt() {
    local name=$1 limit=$2 start status said
    shift 2
    ((limit > $(left))) && limit=$(left)
    if ((limit < 3)); then
        record "$name" "no-time" 0
        return 1
    fi
    start=$(date +%s%N)
    timeout --kill-after=5 "$limit" "$@" >"$work/$name.log" 2>&1 </dev/null
    status=$?
    case $status in
    0) said=ok ;;
    124 | 137) said="timeout" ;;
    *) said="failed($status)" ;;
    esac
    record "$name" "$said" "$(awk "BEGIN { printf \"%.1f\", ($(date +%s%N) - $start) / 1e9 }")"
    ((status == 0)) || tail -n 6 "$work/$name.log" | cut -c 1-300 | sed 's/^/    | /'
    return "$status"
}

# absent NAME WHY: adds a row for a part that this machine cannot run
absent() {
    echo "skipped: $2" | tee "$work/$1.log"
    record "$1" absent 0
}

# find_keys: lists all available answer keys in the array `keys`
find_keys() {
    local key
    keys=()
    for key in "$here"/keys/*.key.safetensors "$scratch"/keys/*.key.safetensors; do
        [[ -e $key ]] && ! [[ $quick && $key == */wide_* ]] && keys+=("$key")
    done
}
# key_name FILE: wide_custom.key.safetensors -> wide
key_name() {
    local name=${1##*/}
    name=${name%.key.safetensors}
    echo "${name%_custom}"
}

stage_doctor() {
    attempt doctor 30 "$ironhorse" doctor --json "$(json doctor)"
    command -v nvidia-smi >/dev/null && attempt nvidia-smi 10 nvidia-smi
}

# All cases take more than six minutes: without --only it is some of them.
stage_selftest() {
    local some=$quick
    [[ $only ]] || some=1
    attempt selftest 460 "$ironhorse" selftest --device cuda ${some:+--quick} --json "$(json selftest)"
}

stage_verify() {
    local key dtype name
    # The width and head size of GPT-2: made here, because such a key is too large for the bundle.
    if [[ ! $quick && ! -e $scratch/keys/wide_custom.key.safetensors ]]; then
        attempt export-wide 60 "$python" -m ironhorse.export gpt2 --batch 2 --seq 128 --steps 3 --stem wide \
            --model n_layer=2,n_head=12,n_embd=768,vocab_size=1003,max_seq_len=128 --out "$scratch/keys"
    fi
    find_keys
    for key in "${keys[@]}"; do
        for dtype in f32 bf16 "bf16 --attention own" fp8 fp8-head; do
            # Layers of other sizes stay in bf16.
            [[ $dtype == fp8* && $key != */wide_* ]] && continue
            name=verify-$(key_name "$key")-${dtype/ --attention /-}
            # shellcheck disable=SC2086  # the flag after the dtype is a separate word
            attempt "$name" 30 "$ironhorse" verify --key "$key" --device cuda --dtype $dtype --json "$(json "$name")"
        done
    done
}

stage_lockstep() {
    local key dtype name
    find_keys
    for key in "${keys[@]}"; do
        for dtype in f32 bf16; do
            name=lockstep-$(key_name "$key")-$dtype
            attempt "$name" 40 "$ironhorse" verify --lockstep --key "$key" --device cuda --dtype $dtype \
                --json "$(json "$name")"
        done
    done
}

# Losses must be bitwise equal from run to run and without graphs; summary.py compares them.
stage_determinism() {
    local name
    for name in determinism-1 determinism-2 determinism-nographs; do
        attempt $name 40 "$ironhorse" bench --device cuda --model d12 --batch 8 --seq 1024 --dtype bf16 --warmup 0 \
            --steps 8 $([[ $name == *nographs ]] && echo --no-graphs) --json "$(json $name)"
    done
}

# The Rust tests that need a GPU or cuDNN: each program of rust.tar.gz is a part.
stage_rust() {
    local program
    attempt rust-unpack 30 tar -xzf "$here/rust.tar.gz" -C "$scratch" || return
    for program in "$scratch"/rust/*; do
        attempt "rust-${program##*/}" 120 "$program" --ignored --skip _in_full --test-threads 1
        # what the search would perhaps not choose for small shapes
        case ${program##*/} in
            bias_sums | gelu_slopes)
                attempt "rust-${program##*/}-own" 120 env IRONHORSE_GELU_PRODUCTS=own "$program" --ignored --test-threads 1 ;;
        esac
    done
}

# The tests of the ops for numpy, PyTorch and C and of user kernels, including those that need a GPU; a part for each file.
# They mostly use the CPU, so all run at once, except those that measure the free memory of the GPU.
stage_python() {
    local file parts=()
    "$python" -c 'import pytest' 2>/dev/null || export PYTHONPATH=$PYTHONPATH:$here/pytest
    for file in "$here"/python/tests/test_{capi_cuda,ops_cuda,nn_cuda,jit,torch}*.py; do
        [[ -e $file && $file != *test_torch_cuda.py ]] || continue
        test_file "$file" &
        parts+=($!)
    done
    ((${#parts[@]})) && wait "${parts[@]}"
    for file in "$here"/python/tests/test_{torch,model}_cuda.py; do
        [[ -e $file ]] && test_file "$file"
    done
}
test_file() {
    local name=${1##*/test_}
    name=python-${name%.py}
    attempt "${name//_/-}" 300 "$python" -m pytest -q -p no:cacheprovider --durations=3 "$1"
}

# The speeds of our ops for PyTorch compared with PyTorch's own, eager and compiled, and of making an op from source.
stage_ops() {
    attempt ops-torch 240 "$python" "$here/benches/torch_ops.py" --json "$(json ops-torch)"
    attempt ops-jit 90 "$python" "$here/benches/jit.py" --json "$(json ops-jit)"
}

# stage_moe
# shellcheck source=scripts/gpu/moe.sh
. "$here/moe.sh"
# stage_table and stage_compare
# shellcheck source=scripts/gpu/table.sh
. "$here/table.sh"
known=$(cut -d ' ' -f 1 <<<"$table_rows")
for row in ${rows//,/ }; do
    member "$row" "${known//$'\n'/ }" || refuse "there is no row '$row'; there are ${known//$'\n'/ }"
done
# stage_ranks
# shellcheck source=scripts/gpu/ranks.sh
. "$here/ranks.sh"
# stage_runs
# shellcheck source=scripts/gpu/runs.sh
. "$here/runs.sh"

# stage_data
# shellcheck source=scripts/gpu/data.sh
. "$here/data.sh"

# stage_f32
# shellcheck source=scripts/gpu/f32.sh
. "$here/f32.sh"

# stage_families
# shellcheck source=scripts/gpu/families.sh
. "$here/families.sh"

# torch cannot compile d48 within the time limit
has_torch() { [[ $torch && $1 != d48-* ]]; }
# torch_run CONFIG FLAG...: sets torch_command to the PyTorch benchmark with its fastest settings for this configuration
torch_run() {
    local config=$1
    shift
    torch_command=("$python" "$here/gpu_torch.py" --model "${config%-b*}" --batch "${config#*-b}" --seq 1024)
    case $config in
    d12-b64) torch_command+=(--sdpa "$([[ $quick ]] && echo best || echo both)") ;;
    d12-b4) torch_command+=(--sdpa best --mode reduce-overhead --steps 50) ;;
    *) torch_command+=(--sdpa best) ;;
    esac
    torch_command+=("$@")
}

# PyTorch fills its cache of compiled code while the checks run; nothing is timed before this has finished.
warm() {
    local config child=
    trap '[[ $child ]] && kill "$child" 2>/dev/null; exit' TERM
    trap - EXIT INT
    for config in ${chosen//,/ }; do
        (($(left) > budget / 2)) && has_torch "$config" || continue
        torch_run "$config" --compile-only
        timeout --kill-after=5 100 "${torch_command[@]}" </dev/null &
        child=$!
        wait "$child"
    done
}
start_warming() {
    [[ $torch ]] && member bench "$wanted" && member selftest "$wanted" || return 0
    warm >"$work/torch-warming.log" 2>&1 &
    warm_pid=$!
}
end_warming() {
    [[ $warm_pid ]] || return 0
    wait "$warm_pid"
    warm_pid=
}

# bench CONFIG DTYPE STEPS WARMUP: ironhorse with its defaults, and with options that may change the last bits of results
bench() {
    local config=$1 dtype=$2 name
    local flags=(--device cuda --model "${config%-b*}" --batch "${config#*-b}" --seq 1024 --dtype "$dtype"
        --steps "$3" --warmup "$4")
    name=bench-$config-$dtype
    attempt "$name" 90 "$ironhorse" bench "${flags[@]}" --json "$(json "$name")"
    [[ $dtype == bf16 ]] || return
    attempt "$name-fast" 90 "$ironhorse" bench "${flags[@]}" --fast --json "$(json "$name-fast")"
}

stage_bench() {
    local config
    end_warming
    for config in ${chosen//,/ }; do
        case $config in # steps for 5 s and more: rates settle only after seconds
        d12-b64) bench "$config" bf16 60 5 ;;
        d12-b4) bench "$config" bf16 500 20 ;;
        d24-b32) bench "$config" bf16 40 4 ;;
        d48-b16) bench "$config" bf16 16 2 ;;
        esac
        has_torch "$config" || continue
        torch_run "$config" --seconds 5 --json "$(json "torch-$config-bf16")"
        attempt "torch-$config-bf16" 150 "${torch_command[@]}"
    done
}

stage_profile() {
    attempt profile 60 "$ironhorse" profile --device cuda --model d12 --batch 64 --seq 1024 --dtype bf16 --steps 3 \
        --trace "$out/trace.json" --json "$(json profile)"
}

stage_sanitizer() {
    local tool found folder flags
    found=$(command -v compute-sanitizer)
    for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda-13* /usr/local/cuda-12*; do
        [[ $found ]] || ! [[ -x $folder/bin/compute-sanitizer ]] || found=$folder/bin/compute-sanitizer
    done
    for tool in memcheck racecheck; do
        if [[ ! $found ]]; then
            absent "sanitizer-$tool" "no compute-sanitizer"
            continue
        fi
        # racecheck does not understand the asynchronous copies in cuDNN's kernels, so only our kernels are checked
        flags=(--quick)
        [[ $tool == racecheck ]] && flags+=(--attention own)
        attempt "sanitizer-$tool" 120 "$found" --tool $tool --error-exitcode 9 \
            "$ironhorse" selftest --device cuda "${flags[@]}"
    done
}

# Time from the command to the end of the first step, first with an empty kernel cache, then with a filled one.
stage_startup() {
    local name
    rm -rf "$scratch/cold"
    for name in startup-cold startup-warm; do
        attempt $name 90 env IRONHORSE_CACHE="$scratch/cold" "$ironhorse" bench --device cuda --model d12 --batch 4 \
            --seq 1024 --dtype bf16 --steps 1 --warmup 0 --json "$(json $name)"
    done
}

# The other precisions, short.
stage_precision() {
    local dtype
    bench d12-b64 tf32 15 2
    bench d12-b64 f32 5 1
    # compiling PyTorch for two more precisions takes minutes: only with --only precision
    for dtype in tf32 f32; do
        [[ $torch && $only ]] || continue
        torch_run d12-b64 --dtype $dtype --steps 3 --seconds 2 --warmup 1 --json "$(json "torch-d12-b64-$dtype")"
        attempt "torch-d12-b64-$dtype" 75 "${torch_command[@]}"
    done
}

finish() {
    trap - EXIT INT TERM
    [[ $warm_pid ]] && kill "$warm_pid" 2>/dev/null
    touch "$work/parts.tsv"
    "$python" "$here/summary.py" "$work" "$out" "$(($(date +%s) - began))"
    local status=$?
    tar -czf "$out/logs.tar.gz" --exclude=checkpoints -C "$work" . && rm -rf "$work"
    exit $status
}
trap finish EXIT
trap 'exit 1' INT TERM

start_warming
for stage in $stages; do
    member "$stage" "$wanted" && "stage_$stage"
done
exit 0
