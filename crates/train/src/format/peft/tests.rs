//! Folders of PEFT: what is read, merged and refused.

use super::*;
use crate::format::atomic;
use crate::format::weights::WeightSource;
use serde_json::{Value, json};

fn config() -> ModelConfig {
    ModelConfig::parse("kind=llama,C=8,L=2,NH=2,NKV=1,HD=4,F=6,V=11,maxT=16").unwrap()
}

fn lora(rank: usize, targets: &str) -> Lora {
    Lora { rank, alpha: 6.0, targets: Targets::parse(targets).unwrap() }
}

/// An adapter whose tensor number i holds i, i + ¼, i + ½, ...
fn written(folder: &Path, lora: &Lora, digest: Option<&str>) {
    let base = BaseFacts { name: "org/base".into(), digest: digest.map(str::to_owned) };
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join(ADAPTER_CONFIG), config_text(lora, &lora.tensors(&config()), &base)).unwrap();
    atomic::write_file(&folder.join(ADAPTER_MODEL), |sink| {
        write_adapter(sink, &lora.tensors(&config()), &base, |index, values| {
            values.iter_mut().enumerate().for_each(|(at, x)| *x = index as f32 + at as f32 / 4.0);
            Ok(())
        })
    })
    .unwrap();
}

fn changed(folder: &Path, key: &str, value: Value) {
    let path = folder.join(ADAPTER_CONFIG);
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    settings[key] = value;
    std::fs::write(path, settings.to_string()).unwrap();
}

/// A base whose weights are all 1.
struct Ones;

impl WeightSource for Ones {
    fn config(&self) -> ModelConfig {
        config()
    }
    fn read_unchecked(&mut self, _: &str, out: &mut [f32]) -> Result<()> {
        out.fill(1.0);
        Ok(())
    }
    fn path(&self) -> &Path {
        Path::new("ones")
    }
}

fn digest_of_ones() -> BaseDigest {
    let mut digest = BaseDigest::default();
    for spec in config().tensors() {
        digest.add(&spec.name, &vec![1.0; spec.shape.numel()]);
    }
    digest
}

#[test]
fn what_is_written_is_read_back() {
    let top = tempfile::tempdir().unwrap();
    let lora = lora(3, "q,v,down");
    written(top.path(), &lora, Some("0badf00d"));
    let mut adapter = AdapterFolder::open(top.path()).unwrap();
    assert_eq!((adapter.lora(), adapter.base().name.as_str()), (lora, "org/base"));
    adapter.check(&config()).unwrap();
    let table = lora.tensors(&config());
    let mut values = vec![0.0; table[1].shape.numel()];
    adapter.read_tensor(&table[1].name, &mut values).unwrap();
    assert_eq!(values[..3], [1.0, 1.25, 1.5]);
    let names: Vec<&str> =
        adapter.file.header().entries().iter().map(|entry| entry.name.as_str()).take(1).collect();
    assert!(names[0].starts_with("base_model.model.model.layers."), "{names:?}");
    let refusal = adapter.check_base(&digest_of_ones(), Path::new("ones")).unwrap_err().to_string();
    assert!(refusal.contains("for the base org/base of digest 0badf00d"), "{refusal}");
}

/// Without a digest only the name of the base tells, and a model has several names.
#[test]
fn a_base_of_another_name_is_doubtful() {
    let top = tempfile::tempdir().unwrap();
    let doubt = |digest: Option<&str>, names: &[&str]| {
        written(top.path(), &lora(3, "q"), digest);
        let names: Vec<&Path> = names.iter().map(Path::new).collect();
        AdapterFolder::open(top.path()).unwrap().doubt(&names)
    };
    let said = doubt(None, &["org/other", "cache/org/other"]).unwrap();
    assert!(said.contains("its base is org/base; it has the shapes of org/other"), "{said}");
    for name in ["org/base", "base", "models/base", "models/base/step-3"] {
        assert_eq!(doubt(None, &["org/other", name]), None, "{name}");
    }
    assert_eq!(doubt(Some("0badf00d"), &["org/other"]), None, "the digest tells");
}

#[test]
fn an_adapter_covered_by_a_larger_one_is_the_same() {
    let top = tempfile::tempdir().unwrap();
    let small = lora(2, "q");
    written(top.path(), &small, None);
    let mut adapter = AdapterFolder::open(top.path()).unwrap();
    let cover = Lora::covering(&[small, lora(3, "q,o")]).unwrap();
    for spec in cover.tensors(&config()) {
        let mut values = vec![f32::NAN; spec.shape.numel()];
        adapter.read_as(&cover, &spec.name, &mut values).unwrap();
        match Lora::part_of(&spec.name).unwrap() {
            AdapterPart { target: crate::model::Target::O, .. } => assert!(values.iter().all(|&x| x == 0.0)),
            AdapterPart { layer: 0, is_b: false, .. } => {
                assert_eq!(values[..3], [0.0, 0.25, 0.5]);
                assert!(values[16..].iter().all(|&x| x == 0.0), "the third row is not its own");
            }
            // alpha / r is 3: the cover's is 1
            AdapterPart { layer: 0, is_b: true, .. } => {
                assert_eq!(values[..6], [3.0, 3.75, 0.0, 4.5, 5.25, 0.0])
            }
            _ => {}
        }
    }
}

#[test]
fn a_merged_weight_is_the_sum() {
    let top = tempfile::tempdir().unwrap();
    written(top.path(), &lora(1, "down"), Some(&digest_of_ones().text()));
    let mut merged = Merged::new(Box::new(Ones), AdapterFolder::open(top.path()).unwrap()).unwrap();
    let mut values = vec![0.0; 8 * 6];
    merged.read_tensor("model.layers.0.mlp.down_proj.weight", &mut values).unwrap();
    // A = (0, ¼, ½, ...), B = (1, 1¼, ...)ᵀ, alpha / r = 6
    assert_eq!(values[..3], [1.0, 2.5, 4.0]);
    assert_eq!(values[6 + 1], 1.0 + 6.0 * 1.25 * 0.25);
    merged.read_tensor("model.layers.0.self_attn.o_proj.weight", &mut values).unwrap();
    assert!(values.iter().all(|&x| x == 1.0), "the others stay");
}

#[test]
fn what_cannot_be_obeyed_is_refused_by_name() {
    let top = tempfile::tempdir().unwrap();
    let refusal = |change: &dyn Fn(&Path)| {
        let folder = top.path().join("adapter");
        let _ = std::fs::remove_dir_all(&folder);
        written(&folder, &lora(3, "q,v"), None);
        change(&folder);
        let opened = AdapterFolder::open(&folder).and_then(|adapter| adapter.check(&config()));
        opened.unwrap_err().to_string()
    };
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({"q_proj": 4})),
        ("fan_in_fan_out", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("a_later_setting", json!(3)),
        ("r", json!(0)),
        ("r", json!("3")),
        ("lora_alpha", json!(null)),
    ] {
        let text = refusal(&|folder| changed(folder, key, value.clone()));
        assert!(text.contains(key) && !text.contains('\n'), "{text}");
    }
    let text = refusal(&|folder| changed(folder, "r", json!(4)));
    assert!(text.contains("[3, 8], expected 4 rows, as adapter_config.json says"), "{text}");
    let text = refusal(&|folder| std::fs::remove_file(folder.join(ADAPTER_MODEL)).unwrap());
    assert!(text.contains(ADAPTER_MODEL), "{text}");
    let text = refusal(&|folder| {
        std::fs::rename(folder.join(ADAPTER_MODEL), folder.join("adapter_model.bin")).unwrap();
    });
    assert!(text.contains("a pickle"), "{text}");
    assert!(AdapterFolder::open(top.path()).unwrap_err().to_string().contains("without adapter_config.json"));
    written(top.path(), &lora(3, "q,v"), None);
    let adapter = AdapterFolder::open(top.path()).unwrap();
    for (sizes, what) in [
        ("kind=llama,C=10,L=2,NH=2,NKV=1,HD=4,F=6,V=11", "[3, 8], expected [3, 10] of this base"),
        ("kind=llama,C=8,L=1,NH=2,NKV=1,HD=4,F=6,V=11", "8 tensors, of more layers or experts"),
        ("kind=llama,C=8,L=3,NH=2,NKV=1,HD=4,F=6,V=11", "model.layers.2"),
        ("d12", "gpt2"),
    ] {
        let text = adapter.check(&ModelConfig::parse(sizes).unwrap()).unwrap_err().to_string();
        assert!(text.contains(what), "{text}");
    }
}

#[test]
fn rslora_has_its_own_factor() {
    let top = tempfile::tempdir().unwrap();
    written(top.path(), &lora(4, "q"), None);
    changed(top.path(), "use_rslora", json!(true));
    let lora = AdapterFolder::open(top.path()).unwrap().lora();
    assert_eq!(lora.scale(), 6.0 / 2.0);
}

/// A mixture of two experts whose gate and up share an A of rank 2, as PEFT stacks them, and whose down has rank 1.
fn stacked(folder: &Path, experts: usize) {
    let name = |place: &str| format!("model.layers.0.mlp.experts{place}.weight");
    let table = [
        TensorSpec::new(name(".base_layer.lora_A"), [2 * experts, 4]),
        TensorSpec::new(name(".base_layer.lora_B"), [6, 2 * experts]),
        TensorSpec::new(name(".lora_A"), [experts, 3]),
        TensorSpec::new(name(".lora_B"), [4, experts]),
    ];
    let base = BaseFacts { name: "org/base".into(), digest: None };
    std::fs::create_dir_all(folder).unwrap();
    let lora = Lora { rank: 1, alpha: 3.0, targets: Targets::parse("down").unwrap() };
    std::fs::write(folder.join(ADAPTER_CONFIG), config_text(&lora, &[], &base)).unwrap();
    changed(folder, "target_parameters", json!(["mlp.experts.gate_up_proj", "down_proj"]));
    changed(folder, "rank_pattern", json!({r".*\.gate_up_proj": 2}));
    changed(folder, "alpha_pattern", json!({r".*\.gate_up_proj": 4}));
    atomic::write_file(&folder.join(ADAPTER_MODEL), |sink| {
        write_adapter(sink, &table, &base, |_, values| {
            values.iter_mut().enumerate().for_each(|(at, x)| *x = at as f32);
            Ok(())
        })
    })
    .unwrap();
}

#[test]
fn stacked_experts_are_taken_apart() {
    let top = tempfile::tempdir().unwrap();
    stacked(top.path(), 2);
    let mixture = |count: usize| {
        let sizes = "kind=moe,C=4,L=1,NH=2,NKV=1,HD=2,K=1,F=3,V=11,maxT=16";
        ModelConfig::parse(&format!("{sizes},E={count}")).unwrap()
    };
    let mut adapter = AdapterFolder::open(top.path()).unwrap();
    adapter.check(&mixture(2)).unwrap();
    // ranks 1 and 2 with factors of 3 and 2 are covered by rank 2 with a factor of 1
    assert_eq!(
        adapter.lora(),
        Lora { rank: 2, alpha: 2.0, targets: Targets::parse("gate,up,down").unwrap() }
    );
    let mut read = |place: &str, numel: usize| {
        let mut values = vec![f32::NAN; numel];
        let name = format!("model.layers.0.block_sparse_moe.experts.{place}.weight");
        adapter.read_tensor(&name, &mut values).unwrap();
        values
    };
    let a: Vec<f32> = (8..16).map(|at| at as f32).collect();
    assert_eq!([read("1.w1.lora_A", 8), read("1.w3.lora_A", 8)], [a.clone(), a]);
    // rows of 2 ranks × 2 experts, experts inside; gate has the first three
    assert_eq!(read("1.w1.lora_B", 6), [1.0, 3.0, 5.0, 7.0, 9.0, 11.0].map(|x| 2.0 * x));
    assert_eq!(read("0.w3.lora_B", 6), [12.0, 14.0, 16.0, 18.0, 20.0, 22.0].map(|x| 2.0 * x));
    assert_eq!(read("1.w2.lora_A", 6), [3.0, 4.0, 5.0, 0.0, 0.0, 0.0]);
    assert_eq!(read("1.w2.lora_B", 8), [3.0, 0.0, 9.0, 0.0, 15.0, 0.0, 21.0, 0.0]);
    let text = adapter.check(&mixture(3)).unwrap_err().to_string();
    assert!(text.contains("[4, 4], expected [6, 4] of this base"), "{text}");
    let dense = ModelConfig::parse("kind=llama,C=4,L=1,NH=2,NKV=1,HD=2,F=3,V=11,maxT=16").unwrap();
    assert!(adapter.check(&dense).unwrap_err().to_string().contains("of experts"));
    for (key, value) in [
        ("target_parameters", json!(["gate.weight"])),
        ("rank_pattern", json!({r"layers\.0\.mlp\.experts\.gate_up_proj": 2})),
        ("alpha_pattern", json!({"q_proj": 2})),
        ("lora_alpha", json!(1e300)), // that of down, whose factor f32 cannot hold
        ("rank_pattern", json!({"gate_up_proj": 0})),
    ] {
        stacked(top.path(), 2);
        changed(top.path(), key, value);
        let text = AdapterFolder::open(top.path()).unwrap_err().to_string();
        assert!(text.contains(key) && !text.contains('\n'), "{text}");
    }
}
