//! `ironhorse train --eval`

use super::Place;
use super::place::TINY;
use super::running::assert_equal;
use serde_json::Value;

/// Questions of which a model of bytes gets some right.
fn questions(place: &Place) {
    let line = |context: &str, label: usize| {
        format!(
            r#"{{"question": "{context}", "choices": [" happy.", " zqx", "?", " e e e"], "label": {label}}}"#
        )
    };
    let lines = ["Ivy was", "One day", "a", "The sun"].iter().enumerate().map(|(at, text)| line(text, at));
    place.write("q.jsonl", lines.collect::<Vec<_>>().join("\n"));
}

/// llm.c's format: a question whose answers are single tokens, one of them `token`.
fn bin(place: &Place, name: &str, token: u16) {
    let body = [2, 1, 5, 1, 9, 1, token];
    let mut words = vec![u16::MAX, 2 * (5 + body.len() as u16), 0, 1, 2];
    words.extend(body);
    let mut header = [0_i32; 256];
    header[..3].copy_from_slice(&[20240522, 1, 1]);
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    place.write(name, bytes);
}

/// The weights and the optimizer's state of a run's last checkpoint.
fn state(place: &Place, run: &str) -> [Vec<u8>; 2] {
    ["model", "state"].map(|file| place.read(&format!("{}/{file}.safetensors", place.last(run))))
}

#[test]
fn grades_on_the_way_change_nothing_else() {
    let place = Place::new();
    questions(&place);
    place.does(&format!("train {TINY} --out plain"));
    let flags = "--eval ivy=q.jsonl --eval-every 2 --eval two=q.jsonl --eval-limit 3";
    let done = place.does(&format!("train {TINY} {flags} --out run --json summary.json"));

    assert_eq!(place.losses("run"), place.losses("plain"));
    assert_eq!(state(&place, "run"), state(&place, "plain"));
    let (graded, plain) = (place.metrics("run"), place.metrics("plain"));
    for (with, without) in graded.iter().zip(&plain) {
        assert_eq!((with.val_loss, with.grad_norm), (without.val_loss, without.grad_norm));
        assert_eq!(with.eval.len(), if [2, 4, 5].contains(&with.step) { 2 } else { 0 }, "{with:?}");
    }

    // as `ironhorse eval` says it of the same weights, in batches of the same size
    place.does("eval --model run --choices ivy=q.jsonl --limit 3 --batch-tokens 32 --json e.json");
    let (result, last) = (&place.json("e.json")["results"]["ivy"], graded[5].eval["ivy"]);
    for (name, value, error) in [
        ("acc", Some(last.acc), last.acc_stderr),
        ("acc_norm", last.acc_norm, last.acc_norm_stderr),
        ("acc_token", Some(last.acc_token), last.acc_token_stderr),
    ] {
        assert_eq!(result[format!("{name},none")].as_f64(), value, "{name}");
        assert_eq!(result[format!("{name}_stderr,none")].as_f64(), error, "{name}");
    }
    assert_eq!((last.questions, last), (3, graded[5].eval["two"]));

    let summary = place.json("summary.json");
    assert_eq!(summary["eval"]["ivy"]["acc"].as_f64(), Some(last.acc));
    let definition = summary["eval"]["ivy"]["definition"].as_str().unwrap();
    assert!(definition.starts_with("prompts as lm-evaluation-harness makes them"), "{definition}");
    for text in [
        "ivy: the first 3 of 4 questions; prompts as lm-",
        "step     2  ivy: acc 0.",
        "step     5  two: acc 0.",
    ] {
        assert!(done.stderr.contains(text), "{text}: {}", done.stderr);
    }
    assert!(done.text().contains("\nivy        acc 0."), "{}", done.text());
    let config: toml::Table = String::from_utf8(place.read("run/config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["eval"].as_array().unwrap()[0].as_str(), Some("ivy=q.jsonl"));
    assert_eq!((config["eval-every"].as_integer(), config["eval-limit"].as_integer()), (Some(2), Some(3)));
    // and the file reproduces the run
    place.does("train --config run/config.toml --out again");
    assert_eq!(place.metrics("again")[5].eval, graded[5].eval);
}

#[test]
fn a_resumed_run_goes_on_grading() {
    let place = Place::new();
    questions(&place);
    bin(&place, "q.bin", 250);
    let flags = format!(
        "train {TINY} --eval ivy=q.jsonl --eval b=q.bin --eval-every 2 --schedule constant --warmup 0"
    );
    place.does(&format!("{flags} --steps 4 --out run"));
    assert_eq!(place.metrics("run")[3].eval.len(), 2);
    place.does("train --resume run --steps 7");
    place.does(&format!("{flags} --steps 7 --out whole"));
    let eval = |run: &str| -> Vec<Value> {
        place.metrics(run).iter().map(|m| serde_json::to_value(&m.eval).unwrap()).collect()
    };
    // the last line of the first start stays as it was: graded after its step
    let (run, whole) = (eval("run"), eval("whole"));
    assert_eq!((&run[2], &run[4..]), (&whole[2], &whole[4..]));
    assert_eq!(place.losses("run"), place.losses("whole"));

    // a run of which the tasks were not known is graded when it is resumed
    place.does(&format!("train {TINY} --out late"));
    assert!(place.metrics("late").iter().all(|m| m.eval.is_empty()));
    let done = place.does("train --resume late --eval ivy=q.jsonl");
    assert!(done.stderr.contains("changed: eval: not set → [\"ivy=q.jsonl\"]"), "{}", done.stderr);
    assert_eq!(place.metrics("late")[5].eval["ivy"].questions, 4);
    let done = place.does("train --resume late");
    assert!(done.text().contains("all 6 steps are done"), "{}", done.text());
    place.does(&format!("train {TINY} --eval ivy=q.jsonl --out early"));
    assert_equal(&place.path("late"), &place.path("early"), 6);
}

#[test]
fn what_cannot_be_graded_is_refused_before_the_first_step() {
    let place = Place::new();
    questions(&place);
    bin(&place, "good.bin", 250);
    bin(&place, "bad.bin", 256);
    place.shard("t.bin", &[1; 100]);
    let words =
        "--model n_layer=1,n_head=1,n_embd=8,vocab_size=300,max_seq_len=16 --batch 1 --seq 8 --steps 1";
    for (flags, texts) in [
        (format!("{TINY} --eval x=none.jsonl"), &["none.jsonl", "No such file"][..]),
        (format!("{TINY} --eval =q.jsonl"), &["--eval", "expected NAME=FILE"]),
        (format!("{TINY} --eval q.jsonl --eval q=good.bin"), &["--eval: two are called q"]),
        (format!("{TINY} --eval x=bad.bin"), &["bad.bin: question 0: a token is 256", "vocabulary of 256"]),
        (format!("{TINY} --eval x=t.bin"), &["t.bin", "multiple-choice"]),
        (format!("{words} --data t.bin --eval x=q.jsonl"), &["--eval x: q.jsonl is text", "--tokenizer"]),
        (
            format!("{words} --data t.bin --tokenizer gpt2 --eval x=q.jsonl"),
            &["50257 tokens, the model only 300"],
        ),
        (format!("{TINY} --eval q.jsonl --eval-limit 0"), &["--eval-limit"]),
    ] {
        place.refuses(&format!("train {flags} --out run"), texts);
    }
    place.does(&format!("train {words} --data t.bin --eval good.bin --out run"));
    assert_eq!(place.metrics("run")[0].eval["good"].questions, 1);
}
