use super::*;
use ironhorse_core::op::Act;

fn moe(text: &str) -> MoeConfig {
    match ModelConfig::parse(text).unwrap() {
        ModelConfig::Moe(config) => config,
        ModelConfig::Gpt2(_) => panic!("{text} is a GPT-2"),
    }
}

/// The parameters of a model as papers count them, without the rows that pad the vocabulary.
fn counted(name: &str) -> usize {
    match ModelConfig::parse(name).unwrap() {
        ModelConfig::Gpt2(config) => {
            config.num_params() - (config.padded_vocab_size - config.vocab_size) * config.n_embd
        }
        ModelConfig::Moe(config) => config.total_params(),
    }
}

#[test]
fn the_keys_say_which_model_it_is() {
    let parse = |text: &str| ModelConfig::parse(text).unwrap();
    assert_eq!(parse("d24").kind(), "gpt2");
    assert_eq!(parse("moe-tiny").kind(), "moe");
    assert_eq!(parse("n_layer=3,n_head=5,n_embd=40").kind(), "gpt2");
    assert_eq!(parse("kind=llama,n_layer=3,n_head=5,n_embd=40,ffn=8").kind(), "llama");
    let config = moe("hidden=40, layers=3, heads=4, kv_heads=2, experts=3, top_k=1, ffn=9, aux_alpha=0.5,");
    assert_eq!((config.head_dim, config.n_kv_head, config.aux_alpha), (10, 2, 0.5));
    assert_eq!((config.vocab_size, config.max_seq_len, config.rms_eps), (32000, 32768, 1e-5));
}

#[test]
fn every_spelling_leads_back_to_the_same_sizes() {
    let odd = MoeConfig { rope_alpha: 1.7, rms_eps: 3e-7, ..moe("moe-tiny") };
    for config in [odd.into(), Gpt2Config::new(16, 300, 3, 5, 40).into()] {
        let config: ModelConfig = config;
        assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config);
        assert_eq!(ModelConfig::parse(&config.to_line()).unwrap(), config, "{}", config.to_line());
        let toml = config.to_line().replace(',', "\n");
        assert_eq!(ModelConfig::from_toml(&toml).unwrap(), config);
    }
}

#[test]
fn mistakes_are_named() {
    let text = |line: &str| ModelConfig::parse(line).unwrap_err().to_string();
    let expected = format!("expected {}, a checkpoint", ModelConfig::listed_names());
    assert!(expected.starts_with("expected d12|gpt2, d24|gpt2-medium, ") && text("d13").contains(&expected));
    assert!(
        text("n_layer=1,n_heads=3")
            .starts_with("unknown key `n_heads`, expected one of: max_seq_len|block_size|")
    );
    assert_eq!(
        text("kind=bert"),
        "kind is \"bert\", expected gpt2, moe, llama, mistral, qwen2, qwen3, qwen3_moe or gemma3_text"
    );
    assert_eq!(
        text("kind=moe,n_layer=2,n_head=2"),
        "hidden|hidden_dim|hidden_size|n_embd|width|d_model|C is missing, expected a whole number"
    );
    assert!(text("kind=moe,n_layers=2,L=2").contains("n_layer|n_layers|layers|depth|L is given twice"));
    assert_eq!(text("ffn=1.5"), "ffn is \"1.5\", expected a whole number");
    assert_eq!(text("ffn=4,rope_alpha=x"), "rope_alpha is \"x\", expected a number");
    assert!(text("ffn=4,wpe=3").starts_with("unknown key `wpe`, expected one of: hidden|"));
    assert_eq!(
        text("hidden=64,layers=1,heads=3,ffn=4"),
        "n_head is 3, expected a divisor of hidden, 64, or a head_dim"
    );
    assert_eq!(
        text("hidden=64,layers=1,heads=4,ffn=4,experts=2,top_k=3"),
        "top_k is 3, expected from 1 to n_experts, 2"
    );
}

const WANT: ModelConfig = ModelConfig::Gpt2(Gpt2Config::new(16, 300, 3, 5, 40));

#[test]
fn every_spelling_is_understood() {
    let spellings = [
        ["n_layer", "n_head", "n_embd", "vocab_size", "max_seq_len"],
        ["layers", "heads", "width", "vocabulary", "block_size"],
        ["depth", "NH", "d_model", "vocab", "context"],
        ["L", "NH", "C", "V", "maxT"],
    ];
    for keys in spellings {
        let pairs: Vec<_> = keys.iter().zip([3, 5, 40, 300, 16]).map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(ModelConfig::parse(&pairs.join(",")).unwrap(), WANT);
        assert_eq!(ModelConfig::from_toml(&format!("kind=\"gpt2\"\n{}", pairs.join("\n"))).unwrap(), WANT);
    }
    assert_eq!(ModelConfig::from_json(&WANT.to_json().to_string()).unwrap(), WANT);
    assert_eq!(ModelConfig::parse("d24").unwrap().width(), 1024);
    assert_eq!(ModelConfig::parse("kind=gpt2, L=1, NH=1, C=2,").unwrap().vocab_size(), 50257);
}

#[test]
fn mistakes_of_a_gpt2_are_named() {
    let inline = |text: &str| ModelConfig::parse(text).unwrap_err().to_string();
    assert!(
        inline("n_layers=3").starts_with("unknown key `n_layers`, expected one of: max_seq_len|block_size|")
    );
    assert_eq!(inline("n_layer=x"), "n_layer is \"x\", expected a whole number");
    assert_eq!(inline("n_layer=-3"), "n_layer is \"-3\", expected a whole number");
    assert_eq!(inline("n_layer=3,L=3"), "n_layer|layers|depth|L is given twice, expected once");
    assert_eq!(inline("n_layer=3,n_head=1"), "n_embd|width|d_model|C is missing, expected a whole number");
    assert_eq!(inline("n_layer=3,n_head"), "`n_head` is without a value, expected KEY=NUMBER");
    assert_eq!(inline("n_layer=3,n_head=3,n_embd=40"), "n_head is 3, expected a divisor of n_embd, 40");
    assert!(inline("n_layer=99999999999999999999").contains("expected a whole number"));

    let toml = |text: &str| ModelConfig::from_toml(text).unwrap_err().to_string();
    assert!(
        toml("n_layer = 3\nn_layer = 4").starts_with("config is not TOML (line 2: "),
        "{}",
        toml("n_layer = 3\nn_layer = 4")
    );
    assert!(toml("\n\n= 3").starts_with("config is not TOML (line 3: "));
    assert_eq!(toml("n_layer = \"3\""), "n_layer is \"3\", expected a whole number");
    assert_eq!(toml("n_layer = 1.5"), "n_layer is 1.5, expected a whole number");
    assert!(toml("[model]\nn_layer = 1").contains("unknown key `model`"));
    assert_eq!(toml("").lines().count(), 1);
}

#[test]
fn a_toml_file_is_named_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.toml");
    assert!(matches!(ModelConfig::from_toml_file(&path), Err(Error::Io { .. })));
    std::fs::write(&path, "n_layer = 0\nn_head = 1\nn_embd = 1\n").unwrap();
    let text = ModelConfig::from_toml_file(&path).unwrap_err().to_string();
    assert!(text.contains("small.toml: n_layer is 0"), "{text}");
}

#[test]
fn every_named_model_is_valid_under_each_of_its_names() {
    for names in ModelConfig::names() {
        let config = ModelConfig::parse(names[0]).unwrap();
        for name in names {
            assert_eq!(ModelConfig::parse(&format!(" {name} ")).unwrap(), config, "{name}");
        }
    }
    assert_eq!(ModelConfig::parse("gpt2-xl").unwrap(), Gpt2Config::new(1024, 50257, 48, 25, 1600).into());
    // as their makers count them
    for (name, params) in [
        ("d12", 124_439_808),
        ("d24", 354_823_168),
        ("d36", 774_030_080),
        ("d48", 1_557_611_200),
        ("moe-6.9b", 6_882_678_528),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.1-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma3-270m", 268_098_176),
        ("gemma3-1b", 999_885_952),
    ] {
        assert_eq!(counted(name), params, "{name}");
    }
}

#[test]
fn a_kind_may_be_demanded() {
    let read = |text: &str, kind| ModelConfig::from_text(text, Notation::Line, Some(kind));
    let text = |text: &str, kind| read(text, kind).unwrap_err().to_string();
    assert_eq!(text("kind=moe", "gpt2"), "kind is \"moe\", expected gpt2");
    let kinds = "moe, llama, mistral, qwen2, qwen3, qwen3_moe or gemma3_text";
    assert_eq!(text("kind=gpt2", "llama"), format!("kind is \"gpt2\", expected {kinds}"));
    assert_eq!(text("d12", "moe"), "model is d12, a gpt2, expected a moe");
    assert_eq!(read("moe-tiny", "llama").unwrap().kind(), "moe");
    assert_eq!(text("L=1", "bert"), format!("kind is \"bert\", expected gpt2, {kinds}"));
    assert!(text("C=24,L=3,NH=6", "moe").starts_with("ffn|ffn_dim|intermediate_size|F is missing"));
    assert_eq!(read("C=24,L=3,NH=6", "gpt2").unwrap().kind(), "gpt2");
}

#[test]
fn a_named_model_may_be_changed() {
    let parse = |text: &str| ModelConfig::parse(text).map_err(|error| error.to_string());
    let longer = Gpt2Config { max_seq_len: 2048, ..Gpt2Config::new(1024, 50257, 12, 12, 768) };
    assert_eq!(parse("d12, context=2048").unwrap(), longer.into());
    assert_eq!(parse("d12,vocab=1000").unwrap().padded_vocab_size(), 1024);
    assert_eq!(parse("moe-tiny,K=1").unwrap().to_json()["top_k"], 1);
    assert_eq!(parse("d12,act=gelu").unwrap(), parse("d12").unwrap());
    let known = crate::error::one_of(Act::ALL.iter().map(|act| act.name()));
    assert_eq!(parse("d12,act=tanh").unwrap_err(), format!("act is \"tanh\", expected {known}"));
    assert!(parse("d13,act=gelu").unwrap_err().starts_with("unknown model `d13`"));
    // gelu is what every file without the key means, so files with it stay as they were
    assert!(parse("d12").unwrap().to_json().get("act").is_none());
}

#[test]
fn a_family_is_told_by_its_kind() {
    let parse = |text: &str| ModelConfig::parse(text).map_err(|error| error.to_string());
    let sizes = "n_layer=2,n_head=2,n_embd=8,ffn=4";
    for (kind, more) in [
        ("llama", ",tied=true"),
        ("llama", ",rope_type=llama3,rope_factor=8,rope_original=64"),
        ("llama", ",rope_type=linear,rope_factor=2.5"),
        ("mistral", ",window=5"),
        ("qwen2", ",tied=true"),
        ("qwen2", ",sliding_window=5,max_window_layers=1"),
        ("qwen3", ",head_dim=6"),
        ("qwen3_moe", ",experts=4,top_k=2"),
        ("moe", ",experts=4,top_k=2,tied=true"),
        ("gemma3_text", ",tied=true"),
        ("gemma3_text", ",window=5,sliding_window_pattern=1,rope_local=50,query_pre_attn_scalar=12"),
    ] {
        let config = parse(&format!("kind={kind},{sizes}{more}")).unwrap();
        assert_eq!(config.kind(), kind, "{more}");
        assert_eq!(parse(&config.to_line()).unwrap(), config);
        assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config);
        let table = toml::to_string(&config.to_json()).unwrap();
        assert_eq!(ModelConfig::from_toml(&table).unwrap(), config, "{table}");
    }
    let refusal = |text: &str| parse(&format!("{sizes},{text}")).unwrap_err();
    assert_eq!(refusal("kind=llama,tied=yes"), "tied is \"yes\", expected true or false");
    assert_eq!(
        refusal("kind=qwen2,experts=4,top_k=1"),
        "n_experts is 4, expected 0 in a model of the family qwen2"
    );
    assert_eq!(
        refusal("kind=llama,rope_factor=8"),
        "rope_factor is 8, expected 1, or a rope_type of linear or llama3"
    );
    assert_eq!(
        refusal("kind=llama,rope_type=llama3,rope_low=4"),
        "rope_low is 4, expected below rope_high, 4"
    );
    assert_eq!(
        refusal("kind=llama,rope_type=yarn"),
        "rope_type is \"yarn\", expected default, linear or llama3"
    );
    for (text, says) in [
        ("kind=llama,window=5", "window is 5, expected 0 in a model of kind llama"),
        ("kind=mistral,window_from=1", "window_from is 1, expected 0 without a window"),
        ("kind=mistral,window=5,window_from=1", "window_from is 1, expected 0 in a model of kind mistral"),
        ("kind=qwen2,window=5,window_from=2", "window_from is 2, expected below n_layer, 2"),
        ("kind=qwen2,window=5,window_every=2", "window_every is 2, expected 0 in a model of kind qwen2"),
        ("kind=gemma3_text,window=0", "window is 0, expected at least 1 in a model of kind gemma3_text"),
        (
            "kind=gemma3_text,window_every=0",
            "window_every is 0, expected at least 1 in a model of kind gemma3_text",
        ),
        ("kind=gemma3_text,window_from=1", "window_from is 1, expected 0 in a model of kind gemma3_text"),
        (
            "kind=gemma3_text,experts=4,top_k=1",
            "n_experts is 4, expected 0 in a model of the family gemma3_text",
        ),
        ("kind=qwen3,rope_local=50", "rope_local is 50, expected 10000 in a model of kind qwen3"),
        ("kind=qwen3,query_scalar=50", "query_scalar is 50, expected 0 in a model of kind qwen3"),
    ] {
        assert_eq!(refusal(text), says);
    }
    // what models had before there was a choice is not in their files
    let plain = parse(&format!("kind=llama,{sizes}")).unwrap().to_json();
    assert!(
        ["family", "tied", "rope_type", "rope_factor", "window"].iter().all(|key| plain.get(key).is_none())
    );
}
