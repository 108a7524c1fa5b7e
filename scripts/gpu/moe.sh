# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# Mixtures of experts: answer keys, a training run and its weights, then speeds compared with PyTorch.

# "cpu" runs the checks without a GPU, in f32 only.
moe_device=${IRONHORSE_DEVICE:-cuda}

# Name, sizes, B, T, routing, reference. They cover: E=3 K=1 with an idle expert and heads 6/3; all experts; every token on
# one expert; head sizes 128 and 16; a Llama; a single token; idle and single experts with K=2; Mixtral and Llama of transformers.
moe_keys="tiny moe-tiny 2 32 spread ironhorse
odd C=48,L=2,NH=6,NKV=3,E=3,K=1,F=40,V=99 3 11 idle ironhorse
all C=128,L=2,NH=2,NKV=1,head_dim=64,E=8,K=8,F=192,V=300 2 65 spread ironhorse
one C=24,L=2,NH=3,HD=8,E=4,K=1,F=20,V=99,maxT=16 3 11 single ironhorse
large C=256,L=2,NH=2,NKV=2,head_dim=128,E=4,K=2,F=320,V=512 1 33 spread ironhorse
llama C=64,L=2,NH=4,NKV=4,E=0,F=128,V=200 2 33 spread ironhorse
token C=24,L=2,NH=3,HD=8,E=4,K=2,F=20,V=99,maxT=16 1 1 spread ironhorse
three C=96,L=2,NH=3,HD=32,E=3,K=1,F=64,V=120 2 33 spread ironhorse
idle C=128,L=2,NH=2,HD=64,E=8,K=2,F=96,V=300 2 40 idle ironhorse
gqa C=64,L=2,NH=6,NKV=3,HD=16,E=8,K=2,F=64,V=128 2 32 spread ironhorse
single moe-tiny 2 32 single ironhorse
mixtral C=64,L=2,NH=6,NKV=3,HD=16,E=4,K=2,F=96,V=200 2 33 spread transformers
theirs C=64,L=2,NH=2,NKV=1,HD=128,E=0,F=128,V=200 2 33 spread transformers"

# Keys whose experts have sizes that 8-bit products take.
moe_fp8="all large"

# The sizes of the 6.9B with eight of its layers.
moe8=hidden=768,n_layer=8,n_head=12,n_kv_head=1,head_dim=64,n_experts=16,top_k=4,ffn=6144,vocab_size=32000
moe8+=,max_seq_len=32768,rope_alpha=8

# Precisions of a run: name, dtype, further flags.
moe_runs="f32 f32
bf16 bf16
all16 bf16 --master residual --moments bf16"

stage_moe() {
    make_moe_keys
    verify_moe_keys
    train_moe
    [[ $quick ]] || time_moe
}

# on_device DTYPE PART: whether the device supports the dtype; records the part as skipped if not
on_device() {
    [[ $moe_device != cpu || $1 == f32 ]] || ! absent "$2" "the CPU has no weights in bf16"
}

# Runs one export per core at a time: most of an export is the start of PyTorch.
make_moe_keys() {
    local name sizes batch seq init reference cores
    cores=$(nproc)
    mkdir -p "$scratch/moe"
    while read -r name sizes batch seq init reference; do
        [[ -e $scratch/moe/$name.key.safetensors ]] && continue
        if ! has_reference "$reference"; then
            absent "export-moe-$name" "no transformers"
            continue
        fi
        while (($(jobs -rp | wc -l) >= cores)); do wait -n; done
        make_moe_key &
    done <<<"$moe_keys"
    wait
}
make_moe_key() {
    attempt "export-moe-$name" 90 env OMP_NUM_THREADS=1 "$python" -m ironhorse.export moe --model "$sizes" --batch "$batch" \
        --seq "$seq" --steps 2 --init "$init" --reference "$reference" --stem "$name" --out "$scratch/moe" &&
        mv "$scratch/moe/${name}_"*.key.safetensors "$scratch/moe/$name.key.safetensors"
}
# has_reference NAME: whether the package that computes the answers of a key is installed
has_reference() {
    [[ $1 == ironhorse ]] ||
        "$python" -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "$1" 2>/dev/null
}

verify_moe_keys() {
    local name sizes batch seq init reference key dtype part
    while read -r name sizes batch seq init reference; do
        key=$scratch/moe/$name.key.safetensors
        for dtype in f32 bf16 $(member "$name" "$moe_fp8" && echo fp8); do
            part=verify-moe-$name-$dtype
            if [[ ! -e $key ]] && ! has_reference "$reference"; then
                absent "$part" "no transformers"
            elif on_device $dtype "$part"; then
                attempt "$part" 30 "$ironhorse" verify --key "$key" --device "$moe_device" --dtype $dtype --json "$(json "$part")"
            fi
        done
    done <<<"$moe_keys"
    for dtype in "f32" "bf16 --master residual --moments bf16"; do
        part=lockstep-moe-tiny-${dtype%% *}
        on_device "${dtype%% *}" "$part" || continue
        # shellcheck disable=SC2086  # the flags after the dtype are separate words
        attempt "$part" 40 "$ironhorse" verify --lockstep --key "$scratch/moe/tiny.key.safetensors" --device "$moe_device" \
            --dtype $dtype --json "$(json "$part")"
    done
}

# What a user does: train, generate text, continue training. moe_check.py checks the results.
train_moe() {
    local name dtype flags runs=$work/moe-runs
    while read -r name dtype flags; do
        on_device "$dtype" "train-moe-$name" || continue
        # shellcheck disable=SC2086  # the flags are separate words
        train_moe_run "$name" "$dtype" $flags </dev/null
    done <<<"$moe_runs"
    rm -rf "$runs" # weights and moments are no logs
}
# train_moe_run NAME DTYPE FLAG...
train_moe_run() {
    local name=$1 run=$runs/$1 check=("$python" "$here/moe_check.py") engine train
    engine=(--device "$moe_device" --dtype "$2")
    shift 2
    train=(train "${engine[@]}" "$@" --batch 8 --seq 64 --sample-tokens 0)
    attempt "train-moe-$name" 45 "$ironhorse" "${train[@]}" --model moe-tiny --steps 300 --out "$run" || return
    attempt "check-moe-$name-loss" 10 "${check[@]}" fell "$run"
    attempt "train-moe-$name-on" 30 "$ironhorse" "${train[@]}" --init "$run" --steps 30 --out "$run-on" &&
        attempt "check-moe-$name-on" 10 "${check[@]}" continued "$run" "$run-on"
    moe_text "$name-greedy" "${engine[@]}" --greedy
    moe_text "$name-drawn" "${engine[@]}" --temperature 0.8 --seed 7
    moe_text "$name-again" "${engine[@]}" --temperature 0.8 --seed 7
    attempt "check-moe-$name-drawn" 10 "${check[@]}" same "$(json "text-moe-$name-drawn")" "$(json "text-moe-$name-again")"
    [[ $name == f32 ]] || return
    moe_text "$name-cpu" --device cpu --dtype f32 --greedy
    attempt "check-moe-$name-cpu" 10 "${check[@]}" same "$(json "text-moe-$name-greedy")" "$(json "text-moe-$name-cpu")"
}
# moe_text NAME FLAG...: 200 tokens of the run
moe_text() {
    local part=text-moe-$1
    shift
    attempt "$part" 30 "$ironhorse" generate --model "$run" --prompt "Ivy was" --tokens 200 "$@" --json "$(json "$part")"
}

# Eight layers of the 6.9B compared with PyTorch; then the whole model.
time_moe() {
    local flags torch_flags
    flags=(--device cuda --seq 1024 --dtype bf16 --steps 5 --seconds 5)
    attempt bench-moe8-b16-bf16 90 "$ironhorse" bench "${flags[@]}" --model "$moe8" --batch 16 \
        --json "$(json bench-moe8-b16-bf16)"
    torch_flags=(--model moe-6.9b --layers 8 --batch 16 --seq 1024 --seconds 4 --sdpa cudnn)
    if [[ $torch ]]; then
        attempt torch-moe8-b16-bf16 120 "$python" "$here/benches/gpu_torch_moe.py" "${torch_flags[@]}" \
            --json "$(json torch-moe8-b16-bf16)"
        attempt torch-moe8-b16-all16 120 "$python" "$here/benches/gpu_torch_moe.py" "${torch_flags[@]}" --recipe bf16 \
            --json "$(json torch-moe8-b16-all16)"
    fi
    attempt bench-moe8-b16-all16 90 "$ironhorse" bench "${flags[@]}" --model "$moe8" --batch 16 --master residual \
        --moments bf16 --json "$(json bench-moe8-b16-all16)"
    attempt experts-moe 100 "$python" "$here/benches/moe_experts.py" --bin "$ironhorse" --device cuda --dtype bf16 --hidden 768 \
        --heads 12 --ffn 2048 --layers 2 --top-k 4 --vocab 8192 --batch 16 --seq 1024 --steps 5 --rounds 1 \
        --json "$(json experts-moe)"
    attempt bench-moe30-b20-all16 150 "$ironhorse" bench "${flags[@]}" --model moe-6.9b --batch 20 --master residual \
        --moments bf16 --recompute gelu --json "$(json bench-moe30-b20-all16)"
}
