//! The named models.

/// Their names, and their sizes as [`ModelConfig::parse`](super::ModelConfig::parse) reads them.
pub(super) const NAMED: &[(&[&str], &str)] = &[
    (&["d12", "gpt2"], "n_layer=12,n_head=12,n_embd=768"),
    (&["d24", "gpt2-medium"], "n_layer=24,n_head=16,n_embd=1024"),
    (&["d36", "gpt2-large"], "n_layer=36,n_head=20,n_embd=1280"),
    (&["d48", "gpt2-xl"], "n_layer=48,n_head=25,n_embd=1600"),
    // 6.9 billion parameters, 1.8 of them active
    (&["moe-6.9b"], "hidden=768,n_layer=30,n_head=12,n_experts=16,top_k=4,ffn=6144,rope_alpha=8"),
    (
        &["moe-tiny"],
        "hidden=64,n_layer=2,n_head=4,n_experts=4,top_k=2,ffn=256,vocab_size=1000,max_seq_len=512",
    ),
    (
        &["llama3.2-1b"],
        "kind=llama,hidden=2048,n_layer=16,n_head=32,n_kv_head=8,ffn=8192,vocab_size=128256,max_seq_len=131072,\
         rope_base=5e5,rope_type=llama3,rope_factor=32,tied=true",
    ),
    (
        &["llama3.1-8b"],
        "kind=llama,hidden=4096,n_layer=32,n_head=32,n_kv_head=8,ffn=14336,vocab_size=128256,max_seq_len=131072,\
         rope_base=5e5,rope_type=llama3,rope_factor=8",
    ),
    (
        &["qwen2.5-0.5b"],
        "kind=qwen2,hidden=896,n_layer=24,n_head=14,n_kv_head=2,ffn=4864,vocab_size=151936,max_seq_len=32768,\
         rope_base=1e6,rms_eps=1e-6,tied=true",
    ),
    (
        &["qwen2.5-1.5b"],
        "kind=qwen2,hidden=1536,n_layer=28,n_head=12,n_kv_head=2,ffn=8960,vocab_size=151936,max_seq_len=32768,\
         rope_base=1e6,rms_eps=1e-6,tied=true",
    ),
    (
        &["qwen2.5-7b"],
        "kind=qwen2,hidden=3584,n_layer=28,n_head=28,n_kv_head=4,ffn=18944,vocab_size=152064,max_seq_len=32768,\
         rope_base=1e6,rms_eps=1e-6",
    ),
    (
        &["qwen3-0.6b"],
        "kind=qwen3,hidden=1024,n_layer=28,n_head=16,n_kv_head=8,head_dim=128,ffn=3072,vocab_size=151936,\
         max_seq_len=40960,rope_base=1e6,rms_eps=1e-6,tied=true",
    ),
    (
        &["qwen3-8b"],
        "kind=qwen3,hidden=4096,n_layer=36,n_head=32,n_kv_head=8,head_dim=128,ffn=12288,vocab_size=151936,\
         max_seq_len=40960,rope_base=1e6,rms_eps=1e-6",
    ),
    // 30.5 billion parameters, 3.3 of them active
    (
        &["qwen3-30b-a3b"],
        "kind=qwen3_moe,hidden=2048,n_layer=48,n_head=32,n_kv_head=4,head_dim=128,n_experts=128,top_k=8,ffn=768,\
         vocab_size=151936,max_seq_len=40960,rope_base=1e6,rms_eps=1e-6,aux_alpha=0.001",
    ),
    (
        &["gemma3-270m"],
        "kind=gemma3_text,hidden=640,n_layer=18,n_head=4,n_kv_head=1,head_dim=256,ffn=2048,vocab_size=262144,\
         max_seq_len=32768,rope_base=1e6,rms_eps=1e-6,tied=true,window=512",
    ),
    (
        &["gemma3-1b"],
        "kind=gemma3_text,hidden=1152,n_layer=26,n_head=4,n_kv_head=1,head_dim=256,ffn=6912,vocab_size=262144,\
         max_seq_len=32768,rope_base=1e6,rms_eps=1e-6,tied=true,window=512",
    ),
];
