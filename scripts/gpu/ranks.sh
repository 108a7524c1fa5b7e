# shellcheck shell=bash disable=SC2154  # a part of run.sh, which sets the variables used here
# Several ranks on real NCCL: worlds of 1, 2 and 4 must train the same bits. With one GPU all ranks share it, which needs NCCL 2.30 or
# newer (pip install nvidia-nccl-cu13) in IRONHORSE_CUDA_PATH or the Python environment, and the variable below.

# Name, model, further flags.
ranks_models="gpt2 n_layer=4,n_head=4,n_embd=256,vocab_size=256,max_seq_len=128
llama hidden=256,layers=4,heads=4,kv_heads=2,ffn=512,vocab=256,context=128
mixture hidden=256,layers=4,heads=4,experts=8,top_k=2,ffn=256,vocab=256,context=128
all16 hidden=256,layers=4,heads=4,kv_heads=2,ffn=512,vocab=256,context=128 --master residual --moments bf16
muon n_layer=4,n_head=4,n_embd=256,vocab_size=256,max_seq_len=128 --optimizer muon
fp8 n_layer=4,n_head=4,n_embd=256,vocab_size=256,max_seq_len=128 --dtype fp8
mixture8 hidden=256,layers=4,heads=4,experts=8,top_k=2,ffn=256,vocab=256,context=128 --dtype fp8"

stage_ranks() {
    local name model more
    export NCCL_MULTI_RANK_GPU_ENABLE=1 work
    while read -r name model more; do
        while (($(jobs -rp | wc -l) >= 3)); do wait -n; done
        worlds "$name" "$model" "$more" &
    done <<<"$ranks_models"
    wait
}

# A model trained by worlds of 1, 2 and 4 with every way to divide it, in buckets small enough that there are some beside the backward; and
# by four as two machines of two, which add up among themselves first.
worlds() {
    local name=$1 world shard
    local line="train --model $2 --device ${IRONHORSE_DEVICE:-cuda} --batch 4 --seq 64 --accumulate 8 --steps 20 --warmup 0"
    line+=" --schedule constant --val-every 10 --val-batches 4 --sample-tokens 0 --save-every 10 --keep 0 --bucket 4MiB $3"
    for world in 1 2 4; do
        for shard in none state grads; do
            [[ $world == 1 && $shard != none ]] && continue
            [[ $name == muon && $shard != none ]] && continue
            # shellcheck disable=SC2086  # flags
            attempt "ranks-$name-$world-$shard" 120 "$ironhorse" $line --ranks $world --shard $shard --out "$work/ranks-$name-$world-$shard"
        done
    done
    # shellcheck disable=SC2086  # flags
    attempt "ranks-$name-4-machines" 120 "$ironhorse" $line --ranks 4 --local-ranks 2 --out "$work/ranks-$name-4-machines"
    attempt "ranks-$name-same" 30 bash -c 'same_ranks "$@"' _ "$name"
}

# Whether all worlds of a model have the same last checkpoint.
same_ranks() {
    local first="$work/ranks-$1-1-none/checkpoints/step-000020" other file failed=0
    for other in "$work/ranks-$1"-*/checkpoints/step-000020; do
        for file in "$first"/*.safetensors; do
            cmp "$file" "$other/$(basename "$file")" || failed=1
        done
    done
    return $failed
}
export -f same_ranks
