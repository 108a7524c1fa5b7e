# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# f32 and tf32: attention cases, answer keys, then GPT-2 124M with B = 32, with and without tensor cores, and in PyTorch.

stage_f32() {
    local dtype products
    # The largest key takes half a minute: make the keys in the background while other checks run.
    make_f32_keys &
    local maker=$!
    for dtype in f32 tf32; do
        test_attention "$dtype" auto
    done
    for products in "" mma; do
        test_linear f32 "$products"
    done
    test_linear tf32 ""
    wait "$maker"
    verify_f32
    # from here on nothing else may run, because times are measured
    for dtype in f32 tf32; do
        bench_f32 "$dtype" auto
    done
    bench_f32 f32 auto mma
    for dtype in f32 tf32; do
        profile_f32 "$dtype" auto
    done
    for dtype in f32 tf32; do
        [[ $torch ]] || continue
        torch_run d12-b32 --dtype "$dtype" --steps 3 --seconds 3 --warmup 2 --json "$(json "torch-d12-b32-$dtype")"
        attempt "torch-d12-b32-$dtype" 90 "${torch_command[@]}"
    done
}

# A small model with the head size of GPT-2, and the whole 124M with enough tokens for split-K weight gradients. They are made
# here because the second is too large for the bundle.
make_f32_keys() {
    f32_key small n_layer=2,n_head=2,n_embd=128,vocab_size=515,max_seq_len=128 1 128
    f32_key d12 d12 2 512 --no-acts
}
# f32_key NAME SIZES B T FLAG...
f32_key() {
    local name=$1 sizes=$2 batch=$3 seq=$4 folder=$scratch/f32
    shift 4
    [[ -e $folder/$name.key.safetensors ]] && return
    mkdir -p "$folder"
    attempt "export-$name" 90 "$python" -m ironhorse.export gpt2 --model "$sizes" --batch "$batch" --seq "$seq" --steps 2 \
        --no-bf16 --stem "$name" --out "$folder" "$@" &&
        mv "$folder/${name}_"*.key.safetensors "$folder/$name.key.safetensors"
}

# products ATTENTION [PRODUCTS]: the products to use; "plain" attention uses no tensor cores except cuBLASLt's in tf32
products() { [[ $1 == plain ]] && echo library || echo "${2:-}"; }
# as ATTENTION [PRODUCTS]: a suffix that names the settings that are not the default
as() { echo "$([[ $1 == auto ]] || echo "-$1")${2:+-$2}"; }

test_attention() {
    local name=selftest-attention-$1$(as "$2")
    attempt "$name" 60 "$ironhorse" selftest --device cuda --dtype "$1" --attention "$2" --op attention_fwd --op attention_bwd \
        --json "$(json "$name")"
}

# test_linear DTYPE PRODUCTS
test_linear() {
    local name=selftest-linear-$1$(as auto "$2")
    attempt "$name" 60 env IRONHORSE_F32_PRODUCTS="$2" "$ironhorse" selftest --device cuda --dtype "$1" --op linear_fwd \
        --op linear_bwd_input --op linear_bwd_weight --json "$(json "$name")"
}

# With our tensor-core kernels and without: a failure in both is not caused by them. Then PyTorch's errors for comparison.
verify_f32() {
    local key=$scratch/f32/d12.key.safetensors dtype attention name
    for dtype in f32 tf32; do
        for attention in auto plain; do
            verify_one d12 "$dtype" "$attention"
        done
        [[ $torch && -e $key ]] || continue
        name=torch-error-d12-$dtype
        attempt "$name" 60 "$python" "$here/torch_error.py" "$key" --dtype "$dtype" --verify "$(json "verify-d12-$dtype")" \
            --verify "$(json "verify-d12-$dtype-plain")" --json "$(json "$name")" && head -n 16 "$work/$name.log"
    done
    for dtype in f32 tf32; do
        verify_one small "$dtype" auto
    done
    name=lockstep-small-f32
    attempt "$name" 40 "$ironhorse" verify --lockstep --key "$scratch/f32/small.key.safetensors" --device cuda --dtype f32 \
        --json "$(json "$name")"
}
# verify_one KEY DTYPE ATTENTION
verify_one() {
    local name=verify-$1-$2$(as "$3")
    attempt "$name" 60 env IRONHORSE_F32_PRODUCTS="$(products "$3")" "$ironhorse" verify --key "$scratch/f32/$1.key.safetensors" \
        --device cuda --dtype "$2" --attention "$3" --json "$(json "$name")"
    grep WRONG "$work/$name.log" | cut -c 1-130 | head -n 12
}

profile_f32() {
    local name=profile-$1$(as "$2")
    # -v shows the result of the search for algorithms: two kernels or one
    attempt "$name" 60 env IRONHORSE_F32_PRODUCTS="$(products "$2")" "$ironhorse" -v profile --device cuda --model d12 --batch 32 \
        --seq 1024 --dtype "$1" --attention "$2" --steps 2 --json "$(json "$name")"
    grep -E 'in two kernels|attention|flash|linear|gemm|gelu|norm|entropy|adamw' "$work/$name.log" | cut -c 1-150 | head -n 40
}

# bench_f32 DTYPE ATTENTION [PRODUCTS]
bench_f32() {
    local name=bench-d12-b32-$1$(as "$2" "${3:-}") steps=30
    [[ $1 == f32 ]] && steps=10
    attempt "$name" 60 env IRONHORSE_F32_PRODUCTS="$(products "$2" "${3:-}")" "$ironhorse" bench --device cuda --model d12 --batch 32 \
        --seq 1024 --dtype "$1" --attention "$2" --steps "$steps" --warmup 2 --json "$(json "$name")"
}
