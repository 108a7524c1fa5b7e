//! Training that diverges, `ironhorse verify --replay` of its black box, and the bytes that `plan` predicts for a run.
#![allow(clippy::unwrap_used, clippy::panic)]

use ironhorse_testkit::crc32;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

const TINY: &str = "--model n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32 --batch 2 --seq 16 --steps 12 \
                    --val-every 0 --sample-tokens 0";

fn ironhorse(place: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ironhorse"));
    command.env("CUDA_VISIBLE_DEVICES", "").args(line.split_whitespace()).current_dir(place);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must end with this exit code; returns its output.
fn ends(place: &Path, code: i32, line: &str) -> (String, String) {
    let output = ironhorse(place, line);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{line}: {err}");
    assert!(!err.contains("panicked"), "{err}");
    (out, err)
}

fn json(place: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(place.join(name)).unwrap()).unwrap()
}

#[test]
fn a_run_that_diverges_can_be_looked_into() {
    let top = tempfile::tempdir().unwrap();
    let place = top.path();
    let (_, err) = ends(place, 1, &format!("train {TINY} --lr 1e30 --warmup 0 --out run"));
    assert!(err.contains("error: training diverged at step 4"), "{err}");
    assert!(err.contains("ironhorse verify --replay run/bad/step-000001"), "{err}");
    assert!(place.join("run/checkpoints/step-000005/trainer.json").is_file());

    // the first bad step in a row, a later one that refers to its weights, and the file itself
    for name in ["step-000001", "step-000004", "step-000003/batch.safetensors"] {
        let (out, _) = ends(place, 1, &format!("verify --replay run/bad/{name} --json v.json"));
        assert!(out.contains("linear_fwd at h.0.attn.c_attn (forward, op 2) wrote"), "{out}");
        assert!(out.contains("it repeats on cpu in f32") && out.contains("beyond what f32 holds"), "{out}");
        let report = json(place, "v.json");
        assert_eq!((&report["cause"], &report["finite"]), (&"overflow".into(), &false.into()));
        let [same, exact] = [0, 1].map(|i| &report["reruns"][i]);
        assert_eq!(
            (&same["role"], &same["finite"], &same["found"]["section"]),
            (&"same".into(), &false.into(), &"forward".into())
        );
        assert_eq!(
            (&exact["role"], &exact["finite"]),
            (&"f64".into(), &true.into()),
            "what f32 lacks f64 has"
        );
    }
    let (out, _) = ends(place, 1, "verify --replay run/bad/step-000001 --no-oracle");
    assert!(out.contains("oracle in f64         not run: --no-oracle"), "{out}");

    let refuses = |line: &str, says: &str| {
        let (out, err) = ends(place, 2, line);
        assert!(out.is_empty() && err.lines().count() == 1 && err.contains(says), "{err}");
    };
    refuses("verify --replay run", "is a run; name one of the black boxes in run/bad");
    refuses("verify --replay nowhere", "nowhere: cannot open");
    refuses("verify --replay run/bad/step-000001 --lockstep", "cannot be used with");
    refuses("verify --no-oracle", "--replay");
    let weights = place.join("run/bad/step-000001/weights");
    let manifest = std::fs::read_to_string(weights.join("trainer.json")).unwrap();
    std::fs::write(weights.join("trainer.json"), manifest.replace("\"step\": 1", "\"step\": 2")).unwrap();
    refuses("verify --replay run/bad/step-000002", "these are other weights");
    std::fs::remove_dir_all(&weights).unwrap();
    refuses("verify --replay run/bad/step-000002", "weights is gone (");
}

/// The black box of a good step, changed to say that it was bad on this device.
fn healthy(place: &Path, device: &str, dtype: &str) {
    ends(place, 1, &format!("train {TINY} --lr 1e30 --warmup 0 --out bad --overwrite"));
    ends(place, 0, &format!("train {TINY} --out good --overwrite"));
    let folder = place.join("bad/bad/step-000001");
    std::fs::remove_dir_all(folder.join("weights")).unwrap();
    std::fs::rename(place.join("good/checkpoints/step-000012"), folder.join("weights")).unwrap();
    let crc = crc32(&std::fs::read(folder.join("weights/trainer.json")).unwrap());
    let path = folder.join("batch.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    let mut step: Value = serde_json::from_str(header["__metadata__"]["step"].as_str().unwrap()).unwrap();
    (step["device"], step["dtype"], step["weights_crc32"]) = (device.into(), dtype.into(), crc.into());
    step["found"] = "".into();
    header["__metadata__"]["step"] = step.to_string().into();
    let mut header = header.to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let changed = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[end..]].concat();
    std::fs::write(&path, changed).unwrap();
}

#[test]
fn a_step_that_does_not_repeat_points_to_the_hardware() {
    let top = tempfile::tempdir().unwrap();
    healthy(top.path(), "cpu", "f32");
    let (out, _) = ends(top.path(), 0, "verify --replay bad/bad/step-000001 --json v.json");
    assert!(out.contains("it did not repeat on cpu in f32") && out.contains("hardware"), "{out}");
    let report = json(top.path(), "v.json");
    assert_eq!(report["cause"], "hardware-or-race");
    let loss = |i: usize| report["reruns"][i]["loss"].as_str().unwrap().parse::<f32>().unwrap();
    assert!((loss(0) - loss(1)).abs() < 1e-4, "f32 and f64 agree on a healthy step: {} {}", loss(0), loss(1));
    // a device that this machine does not have: what can and cannot be concluded
    healthy(top.path(), "cuda:0", "bf16");
    let (out, _) = ends(top.path(), 0, "verify --replay bad/bad/step-000001 --json v.json");
    assert!(out.contains("cuda:0 in bf16        not run: "), "{out}");
    assert!(out.contains("cannot be told"), "{out}");
    assert_eq!(json(top.path(), "v.json")["cause"], "unknown");
    let (out, _) = ends(top.path(), 0, "verify --replay bad/bad/step-000001 --device cpu --no-oracle");
    assert!(out.contains("cuda:0 in bf16        not run: --device cpu"), "{out}");
}

#[test]
fn plan_says_what_a_run_will_write() {
    let top = tempfile::tempdir().unwrap();
    let model =
        "--model n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32 --batch 2 --seq 16 --device cpu";
    let (out, _) = ends(top.path(), 0, &format!("plan {model} --json plan.json"));
    assert!(out.contains("\na checkpoint ") && out.contains("--keep 2"), "{out}");
    let disk = |name: &str| json(top.path(), name)["disk"].clone();
    let (plan, number) = (disk("plan.json"), |value: &Value| value.as_u64().unwrap());
    let one = number(&plan["checkpoint_bytes"]);
    assert_eq!(number(&plan["kept_bytes"]), 4 * one, "two, the best, the one being written");
    assert!(number(&plan["save_memory_bytes"]) < one && number(&plan["save_memory_bytes"]) > one / 100);

    // a run writes exactly what was planned
    ends(top.path(), 0, &format!("train {TINY} --out run"));
    let folder = top.path().join("run/checkpoints/step-000012");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    let written: u64 = files.sum();
    assert!(written <= one && written + (2 << 20) > one, "{written} bytes written, {one} planned");

    ends(top.path(), 0, &format!("plan {model} --keep 0 --json all.json"));
    assert_eq!(disk("all.json")["kept_bytes"], Value::Null, "all are kept");
    ends(top.path(), 0, &format!("plan {model} --dtype bf16 --keep 1 --json bf16.json"));
    assert_eq!(number(&disk("bf16.json")["kept_bytes"]), 3 * number(&disk("bf16.json")["checkpoint_bytes"]));
}
