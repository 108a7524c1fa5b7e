# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# The families people fine-tune: answer keys of transformers, PEFT and preferences, fine-tuning on chats; and the speeds of
# whole training and of adapters compared with transformers (where Python has it).

# Name, model, B, T, steps, flags of bench, and after "|" flags of the PyTorch side; "-" leaves PyTorch out.
family_rows="qwen2.5-0.5b-b32 qwen2.5-0.5b 32 1024 12 |
qwen2.5-1.5b-b16 qwen2.5-1.5b 16 1024 12 |
qwen2.5-0.5b-step qwen2.5-0.5b 32 1024 3 --accumulate 16 | -
qwen2.5-1.5b-step qwen2.5-1.5b 32 1024 2 --accumulate 16 | -
qwen2.5-7b-all16 qwen2.5-7b 10 1024 5 --master residual --moments bf16 | -
qwen2.5-7b-step qwen2.5-7b 8 1024 1 --master residual --moments bf16 --accumulate 16 | -
qwen3-0.6b-lora qwen3-0.6b 16 2048 10 --lora 16 | --lora 16
qwen3-8b-lora qwen3-8b 8 2048 4 --lora 16 | -"

stage_families() {
    verify_families
    tune_families
}

# Every key in f32 and bf16, and op by op beside the CPU engine; small models, so eight processes at once.
verify_families() {
    local key name mode
    for key in "$here"/keys/families/*.key.safetensors; do
        [[ -e $key ]] || {
            absent families-keys "no answer keys in the bundle"
            return
        }
        for mode in "--dtype f32" "--dtype bf16" "--lockstep --dtype bf16"; do
            name=$(key_name "$key")
            [[ $name == dpo-* && $mode == "--dtype bf16" ]] && continue # the key has no errors of bf16; lockstep checks it
            name=families-$name-${mode##* }$([[ $mode == *lockstep* ]] && echo -lockstep)
            while (($(jobs -rp | wc -l) >= 8)); do wait -n; done
            # shellcheck disable=SC2086  # the flags are separate words
            attempt "$name" 60 "$ironhorse" verify --key "$key" --device cuda $mode --json "$(json "$name")" &
        done
    done
    wait
}

# A small model of bytes learns chats and preferences, whole and with adapters; stopped and resumed, its weights must be the
# same bits. The commands run in one folder.
tune_families() {
    local place=$work/tune i name flags
    mkdir -p "$place" && cd "$place" || return
    printf '%s' "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}." \
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" >template.jinja
    for ((i = 0; i < 60; i++)); do
        printf '{"messages": [{"role": "user", "content": "say %d"}, {"role": "assistant", "content": "%s"}]}\n' "$i" \
            "$(printf 'ab%.0s' $(seq $((1 + i % 9))))" >>chats.jsonl
        printf '{"prompt": "say %d: ", "chosen": "%s", "rejected": "%s"}\n' "$i" \
            "$(printf 'ab%.0s' $(seq $((1 + i % 9))))" "$(printf 'yz%.0s' $(seq $((1 + i % 7))))" >>pairs.jsonl
    done
    attempt tune-model 60 "$ironhorse" train --device cuda --steps 20 --batch 8 --seq 64 --sample-tokens 0 --out base \
        --model hidden=256,layers=2,heads=4,kv_heads=2,ffn=512,vocab=256,context=128 &&
        attempt tune-convert 30 "$ironhorse" convert base model && cp template.jinja model/chat_template.jinja
    while read -r name flags; do
        # shellcheck disable=SC2086  # the flags are separate words
        attempt "tune-$name" 90 "$ironhorse" tune model --device cuda $flags --steps 24 --seq 128 --batch 2 --out "$name" \
            --json "$(json "tune-$name")"
        attempt "tune-$name-again" 120 bash -c 'resumed "$@"' _ "$name" $flags
    done <<'ROWS'
chat --data chats.jsonl --lr 1e-3
chat-lora --data chats.jsonl --lr 1e-2 --lora 8
pairs --data pairs.jsonl --lr 1e-3 --dpo
pairs-lora --data pairs.jsonl --lr 1e-2 --dpo --lora 8
ROWS
    cd "$here" || return
}
# resumed NAME FLAG...: the run again, but from its first checkpoint on by --resume; every weight file must be equal
resumed() {
    local name=$1 file
    shift
    "$ironhorse" tune model --device cuda "$@" --steps 24 --seq 128 --batch 2 --save-every 10 --keep 0 --out "cut-$name" &&
        rm -r "cut-$name"/checkpoints/step-00002* && "$ironhorse" tune --resume "cut-$name" || return
    for file in "$name"/checkpoints/step-000024/*model.safetensors; do
        cmp "$file" "cut-$file" || return
    done
}
export -f resumed
export ironhorse

stage_families_bench() {
    local name model batch seq steps flags theirs
    while read -r name model batch seq steps flags; do
        theirs=${flags##*|} flags=${flags%%|*}
        # shellcheck disable=SC2086  # the flags are separate words
        attempt "bench-$name" 100 "$ironhorse" bench --device cuda --model "$model" --batch "$batch" --seq "$seq" \
            --dtype bf16 --steps "$steps" --warmup 2 $flags --json "$(json "bench-$name")"
        [[ $torch && $theirs != " -" ]] || continue
        if ! "$python" -c 'import transformers' 2>/dev/null; then
            absent "torch-$name" "no transformers in this Python"
            continue
        fi
        # shellcheck disable=SC2086
        attempt "torch-$name" 150 "$python" "$here/benches/gpu_torch_hf.py" --model "$model" --batch "$batch" --seq "$seq" \
            --sdpa cudnn --seconds 4 $theirs --json "$(json "torch-$name")"
    done <<<"$family_rows"
}
