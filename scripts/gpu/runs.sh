# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# Interrupted runs: bitwise equal after resuming, killed at random moments, and the cost of saving.

# "cpu" runs the checks without a GPU, in f32 only.
runs_device=${IRONHORSE_DEVICE:-cuda}

# Name, flags: every precision, accumulation, a mixture of experts.
resume_checks="f32 --dtype f32
bf16 --dtype bf16 --accumulate 2
all16 --dtype bf16 --master residual --moments bf16
moe --dtype bf16 --model hidden=128,layers=2,heads=4,experts=8,top_k=2,ffn=128,vocab=256,context=128 --accumulate 2
moe16 --dtype bf16 --model hidden=128,layers=2,heads=4,experts=8,top_k=2,ffn=128,vocab=256,context=128 --master residual --moments bf16
fp8 --dtype fp8 --accumulate 2
moe8 --dtype fp8 --model hidden=256,layers=2,heads=4,experts=8,top_k=2,ffn=256,vocab=256,context=128 --accumulate 2"

stage_runs() {
    local name flags
    while read -r name flags; do
        [[ $runs_device != cpu || $name == f32 ]] || continue
        # shellcheck disable=SC2086  # the flags are separate words
        attempt "resume-$name" 90 "$ironhorse" resume-check --device "$runs_device" $flags --json "$(json "resume-$name")"
    done <<<"$resume_checks"
    attempt torture 150 "$ironhorse" resume-check --torture 12 --torture-seed 1 --device "$runs_device" --json "$(json torture)"
    [[ $quick || $runs_device == cpu ]] || saving_costs
}

# The same 124M run without and with saves, alternating twice; then a run that is killed and resumed; then a save of the 6.9B.
saving_costs() {
    local turn name runs=$work/runs steps=400
    local model="--model d12 --batch 64 --seq 1024 --dtype bf16 --val-batches 0 --sample-tokens 0 --device cuda --lr 1e-4"
    mkdir -p "$runs"
    make_shard "$runs/tokens.bin" || return
    for turn in 1 2; do
        for name in plain saves; do
            # shellcheck disable=SC2086
            attempt "train-$name-$turn" 90 "$ironhorse" train $model --data "$runs/tokens.bin" --steps $steps --save-minutes 0 \
                $([[ $name == saves ]] && echo --save-every 100) --out "$runs/$name-$turn" --json "$(json "train-$name-$turn")"
            [[ $name == saves && $turn == 2 ]] || rm -rf "$runs/$name-$turn"
        done
    done
    attempt resume-124m 60 "$ironhorse" train --resume "$runs/saves-2" --steps $((steps + 50)) --json "$(json resume-124m)"
    rm -rf "$runs"/*-[12]
    export ironhorse work runs
    export -f save_large
    attempt save-6.9b 150 bash -c save_large
    rm -rf "$runs"
}

# How long a save of the 6.9B delays a step: one save, stopped once its copy is made, because the disk has no room for two.
save_large() {
    local log=$work/large.log
    "$ironhorse" train --model moe-6.9b --data "$runs/tokens.bin" --batch 16 --seq 1024 --dtype bf16 --device cuda --master residual \
        --moments bf16 --recompute gelu --val-batches 0 --sample-tokens 0 --steps 1000 --save-minutes 0 --save-every 60 --lr 1e-4 -v \
        --out "$runs/large" >"$log" 2>&1 &
    until grep -q "to host memory" "$log"; do
        kill -0 $! || break
        sleep 1
    done
    kill -9 $!
    grep "to host memory" "$log"
}

# make_shard FILE: writes two million arbitrary tokens
make_shard() {
    "$python" - "$1" <<'PYTHON'
import random, struct, sys

random.seed(1)
tokens = [random.randrange(32000) for _ in range(1 << 21)]
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
    file.write(struct.pack(f"<{len(tokens)}H", *tokens))
PYTHON
}
