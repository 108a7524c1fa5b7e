# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets what is not set here
# f32 and tf32: attention's cases, answer keys, then GPT-2 124M with B = 32 with tensor cores and without, beside PyTorch.

stage_f32() {
    local dtype
    # Made while the GPU does something else: the answers of the whole 124M, too large to travel.
    make_d12_key &
    local maker=$!
    for dtype in f32 tf32; do
        test_attention "$dtype" auto
    done
    test_attention f32 plain
    attempt selftest-linear-tf32 60 "$ironhorse" selftest --device cuda --dtype tf32 --op linear_fwd --op linear_bwd_input \
        --op linear_bwd_weight --json "$(json selftest-linear-tf32)"
    for dtype in tf32 f32; do
        profile_f32 "$dtype" auto
        profile_f32 "$dtype" plain
    done
    wait "$maker"
    verify_f32
    # nothing else runs from here on
    for dtype in tf32 f32; do
        bench_f32 "$dtype" auto
        bench_f32 "$dtype" plain
        [[ $torch ]] || continue
        torch_run d12-b32 --dtype "$dtype" --steps 3 --seconds 3 --warmup 2 --json "$(json "torch-d12-b32-$dtype")"
        attempt "torch-d12-b32-$dtype" 90 "${torch_command[@]}"
    done
}

make_d12_key() {
    [[ -e $scratch/f32/d12.key.safetensors ]] && return
    mkdir -p "$scratch/f32"
    attempt export-d12 90 "$python" -m ironhorse.export gpt2 --model d12 --batch 2 --seq 128 --steps 2 --no-acts --no-bf16 \
        --stem d12 --out "$scratch/f32" && mv "$scratch"/f32/d12_*.key.safetensors "$scratch/f32/d12.key.safetensors"
}

# as ATTENTION: a suffix for what is not the default
as() { [[ $1 == auto ]] || echo "-$1"; }

test_attention() {
    local name=selftest-attention-$1$(as "$2")
    attempt "$name" 60 "$ironhorse" selftest --device cuda --dtype "$1" --attention "$2" --op attention_fwd --op attention_bwd \
        --json "$(json "$name")"
}

verify_f32() {
    local key dtype name
    for key in "$here"/keys/*.key.safetensors "$scratch/f32/d12.key.safetensors"; do
        for dtype in f32 tf32; do
            name=verify-$(key_name "$key")-$dtype
            attempt "$name" 60 "$ironhorse" verify --key "$key" --device cuda --dtype "$dtype" --json "$(json "$name")"
        done
    done
    name=lockstep-small-f32
    attempt "$name" 40 "$ironhorse" verify --lockstep --key "$here/keys/small_custom.key.safetensors" --device cuda --dtype f32 \
        --json "$(json "$name")"
}

profile_f32() {
    local name=profile-$1$(as "$2")
    # -v: what the search for algorithms found, two kernels or one
    attempt "$name" 60 "$ironhorse" -v profile --device cuda --model d12 --batch 32 --seq 1024 --dtype "$1" --attention "$2" \
        --steps 2 --json "$(json "$name")"
    grep -E 'in two kernels|attention|linear|gelu|norm|entropy|adamw' "$work/$name.log" | cut -c 1-150 | head -n 40
}

bench_f32() {
    local name=bench-d12-b32-$1$(as "$2") steps=30
    [[ $1 == f32 ]] && steps=10
    attempt "$name" 60 "$ironhorse" bench --device cuda --model d12 --batch 32 --seq 1024 --dtype "$1" --attention "$2" \
        --steps "$steps" --warmup 2 --json "$(json "$name")"
}
