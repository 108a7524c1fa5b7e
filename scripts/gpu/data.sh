# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# Text as data: training on it, whether the loader keeps up, and the time to grade as many questions as HellaSwag has.

stage_data() {
    local data=$work/data turn name
    mkdir -p "$data"
    attempt data-make 60 "$python" "$here/data_make.py" "$data" || return
    attempt data-prepare 60 "$ironhorse" prepare "$data/text.txt" --tokenizer gpt2 --val-tail 0.01 --out "$data/shards" \
        --json "$(json data-prepare)" || return
    # Steps on shards beside steps on tokens that are already there, alternating twice; summary.py compares them.
    local size="--device cuda --model d12 --batch 64 --seq 1024 --dtype bf16"
    for turn in 1 2; do
        # shellcheck disable=SC2086  # the flags are separate words
        attempt "data-bench-$turn" 60 "$ironhorse" bench $size --steps 60 --warmup 5 --json "$(json "data-bench-$turn")"
        name=data-train-$turn
        # shellcheck disable=SC2086
        attempt "$name" 60 "$ironhorse" train $size --data "$data/shards" --steps 100 --val-batches 0 --sample-tokens 0 --save-minutes 0 \
            --out "$data/run-$turn" --json "$(json "$name")"
    done
    attempt data-hellaswag 60 "$ironhorse" eval --device cuda --model "$data/run-2" --choices "$data/questions.jsonl" \
        --json "$(json data-hellaswag)"
    # A GPU in f32 grades as the CPU does, question by question.
    for name in cuda cpu; do
        attempt "data-grade-$name" 90 "$ironhorse" eval --device $name --dtype f32 --model "$data/run-2" --limit 40 \
            --choices "$data/questions.jsonl" --samples "$data/$name.jsonl"
    done
    attempt data-grades-agree 20 "$python" "$here/data_make.py" --compare "$data/cuda.jsonl" "$data/cpu.jsonl"
    rm -rf "$data"
}
