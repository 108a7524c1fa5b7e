# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# The rows of the README's GPU table, each compared with PyTorch, in one call; and a comparison of two builds of ironhorse.

# Name, model, B, dtype, steps, further flags of bench.
table_rows="d12-b64 d12 64 bf16 60
d12-b64-fp8 d12 64 fp8 60
d12-b64-fp8-head d12 64 fp8-head 60
d12-b4 d12 4 bf16 400
d24-b32 d24 32 bf16 30
d48-b16 d48 16 bf16 12
d48-b38-all16 d48 38 bf16 6 --master residual --moments bf16
d48-b38-all16-fp8 d48 38 fp8 6 --master residual --moments bf16
d12-b32-tf32 d12 32 tf32 25
d12-b32-f32 d12 32 f32 10
moe8-b16 $moe8 16 bf16 30
moe8-b16-all16 $moe8 16 bf16 30 --master residual --moments bf16
moe30-b20-all16 moe-6.9b 20 bf16 6 --master residual --moments bf16 --recompute gelu
moe30-b20-all16-fp8 moe-6.9b 20 fp8 6 --master residual --moments bf16 --recompute gelu"

stage_table() {
    local name model batch dtype steps flags
    while read -r name model batch dtype steps flags; do
        [[ ! $rows ]] || member "$name" "$rows" || continue
        # shellcheck disable=SC2086  # the flags are separate words
        table_bench "$ironhorse" "bench-$name" "$model" "$batch" "$dtype" "$steps" $flags
        [[ $torch ]] && table_torch "$name" "$dtype"
    done <<<"$table_rows"
    attempt table-rows 10 "$python" "$here/table.py" "$work" --json "$out/table-rows.json" && cat "$work/table-rows.log"
}

# table_bench BINARY PART MODEL B DTYPE STEPS FLAG...
table_bench() {
    local binary=$1 part=$2 model=$3 batch=$4 dtype=$5 steps=$6
    shift 6
    attempt "$part" 100 "$binary" bench --device cuda --model "$model" --batch "$batch" --seq 1024 --dtype "$dtype" \
        --steps "$steps" --warmup 3 "$@" --json "$(json "$part")"
}

# table_torch ROW DTYPE: PyTorch's side of a row. It cannot compile the largest models within the time limit, and has no
# fp8 of its own: those rows are compared with ours in bf16.
table_torch() {
    local part=torch-$1 moe=("$python" "$here/benches/gpu_torch_moe.py" --model moe-6.9b --layers 8 --batch 16 --seq 1024
        --seconds 4 --sdpa cudnn)
    case $1 in
    d48-* | moe30-* | *-fp8*) return ;;
    moe8-b16) attempt "$part" 120 "${moe[@]}" --json "$(json "$part")" ;;
    moe8-b16-all16) attempt "$part" 120 "${moe[@]}" --recipe bf16 --json "$(json "$part")" ;;
    *-tf32 | *-f32)
        torch_run "${1%-*}" --dtype "$2" --steps 3 --seconds 3 --warmup 2 --json "$(json "$part")"
        attempt "$part" 90 "${torch_command[@]}"
        ;;
    *)
        torch_run "$1" --seconds 4 --json "$(json "$part")"
        attempt "$part" 150 "${torch_command[@]}"
        ;;
    esac
}

# IRONHORSE_BEFORE names another build: both run twice, alternating, so that the table can show noise and difference.
stage_compare() {
    local name model batch dtype steps flags turn
    if [[ ! -x ${IRONHORSE_BEFORE:-} ]]; then
        absent compare "IRONHORSE_BEFORE names no binary"
        return
    fi
    for turn in 1 2; do
        while read -r name model batch dtype steps flags; do
            [[ $name == moe30-* || $name == d48-* || $name == *-fp8* ]] && continue
            # shellcheck disable=SC2086
            table_bench "$IRONHORSE_BEFORE" "before-$turn-$name" "$model" "$batch" "$dtype" "$steps" $flags
            # shellcheck disable=SC2086
            table_bench "$ironhorse" "after-$turn-$name" "$model" "$batch" "$dtype" "$steps" $flags
        done <<<"$table_rows"
    done
    attempt compare-rows 10 "$python" "$here/table.py" "$work" --compare --json "$out/compare-rows.json" &&
        cat "$work/compare-rows.log"
}
