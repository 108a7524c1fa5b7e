//! `ironhorse prepare`, and `train` on text.

use super::Place;
use super::place::TINY;
use std::io::Write;
use std::process::Stdio;

const TEXT: &str = "Ivy was a cat. She didn't like rain; it's 1234 drops – été.\n";

#[test]
fn text_to_shards_and_training_on_the_folder() {
    let place = Place::new();
    place.write("book.txt", TEXT.repeat(200));
    let done = place.does("prepare book.txt --tokenizer bytes --out data --val-tail 0.1 --json p.json");
    assert!(done.text().starts_with("2 documents, "), "{}", done.text());
    let report = place.json("p.json");
    assert_eq!(report["train"][0]["file"], "data_train_000000.bin");
    assert_eq!((&report["unchanged"], &report["counts"]["val_documents"]), (&false.into(), &1.into()));
    assert!(
        place
            .does("prepare book.txt --tokenizer bytes --out data --val-tail 0.1")
            .text()
            .contains("nothing to do")
    );
    let done = place.does(&format!("train {TINY} --data data --out run"));
    assert!(done.stderr.contains("validation loss"), "{}", done.stderr);
    place.does("generate --model run --tokens 5");
}

#[test]
fn the_same_bytes_for_any_number_of_threads() {
    let place = Place::new();
    let lines: String = (0..5000).map(|n| format!("{{\"text\": \"line {n} of {}\"}}\n", n % 7)).collect();
    place.write("a.jsonl", lines);
    for threads in ["1", "3"] {
        place.does(&format!(
            "prepare a.jsonl --threads {threads} --out t{threads} --name d --shard-tokens 10K --val 0.1"
        ));
    }
    let of = |folder: &str| {
        let files = place.files().into_iter().filter(|(path, _)| path.parent() == Some(&place.path(folder)));
        files.map(|(path, bytes)| (path.file_name().unwrap().to_owned(), bytes)).collect::<Vec<_>>()
    };
    assert!(of("t1").len() > 5 && of("t1") == of("t3"));
}

#[test]
fn standard_input_with_a_delimiter() {
    let place = Place::new();
    let mut command = place.command("prepare - --tokenizer bytes --delimiter <|> --out data --val 0");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one<|>two<|>\n<|>three\n").unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
    let tokens: Vec<u8> =
        place.read("data/data_train_000000.bin")[1024..].iter().step_by(2).copied().collect();
    assert_eq!(tokens, b"\0one\0two\0three");
}

#[test]
fn what_is_wrong_is_one_line() {
    let place = Place::new();
    place.write("bad.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n");
    place.write("program.txt", b"\x7fELF\0\0");
    place.write("picture.png", "x");
    place.write("cut.txt.gz", b"\x1f\x8b\x08\0");
    // the folder is made before the inputs are read
    std::fs::create_dir(place.path("data")).unwrap();
    let refuses = |line: &str, texts: &[&str]| {
        let done = place.runs(line);
        assert_eq!((done.code, done.stderr.lines().count()), (Some(2), 1), "{line}: {}", done.stderr);
        texts.iter().for_each(|text| assert!(done.stderr.contains(text), "{line}: {}", done.stderr));
        assert!(!place.path("data/manifest.json").exists());
    };
    refuses(
        "prepare bad.jsonl --overwrite",
        &["bad.jsonl: line 2 has a number in the field `text`, expected a string", "--skip-bad"],
    );
    refuses(
        "prepare bad.jsonl --field body --overwrite",
        &["bad.jsonl: line 1 has no field `body`", "--field"],
    );
    refuses("prepare program.txt --overwrite", &["program.txt: holds zero bytes, expected text"]);
    refuses(
        "prepare picture.png --overwrite",
        &["picture.png: its name does not say what it holds", "--format"],
    );
    refuses("prepare cut.txt.gz --overwrite", &["cut.txt.gz: cannot read"]);
    refuses("prepare nope.txt", &["nope.txt"]);
    refuses("prepare", &["INPUT"]);
    refuses("prepare bad.jsonl --tokenizer gpt5", &["tokenizer gpt5: is neither a known name nor a file"]);
    refuses("prepare bad.jsonl --separator </s>", &["no special token `</s>`"]);
    refuses("prepare bad.jsonl --shard-tokens 0", &["--shard-tokens", "such as 100M"]);
    let done = place.does("prepare bad.jsonl program.txt --skip-bad --overwrite");
    assert!(
        done.text().contains("1 invalid lines left out, 1 files left out that are not text"),
        "{}",
        done.text()
    );
}

#[cfg(unix)]
#[test]
fn stopped_by_a_signal_it_goes_on() {
    use rustix::process::{Pid, Signal, kill_process};
    let place = Place::new();
    place.write("a.txt", TEXT.repeat(400_000));
    place.does("prepare a.txt --out whole --name d");
    let mut child = place
        .command("prepare a.txt --out data --name d --threads 1")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // once a shard is begun
    let begun = || {
        place.path("data").read_dir().is_ok_and(|mut files| {
            files.any(|file| file.unwrap().path().extension().is_some_and(|end| end == "partial"))
        })
    };
    while !begun() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(3));
    assert!(!place.path("data/manifest.json").exists());
    place.does("prepare a.txt --out data --name d");
    assert!(place.read("data/d_train_000000.bin") == place.read("whole/d_train_000000.bin"));
    assert!(place.read("data/manifest.json") == place.read("whole/manifest.json"));
}

#[test]
fn training_on_text_just_works() {
    let place = Place::new();
    place.write("book.txt", TEXT.repeat(200));
    let done = place.does(&format!("train {TINY} --data book.txt --out run"));
    assert!(
        done.stderr.contains("book.txt: ") && done.stderr.contains("prepared in runs/.data/"),
        "{}",
        done.stderr
    );
    assert!(done.stderr.contains("validation loss"), "{}", done.stderr);
    let again = place.does(&format!("train {TINY} --data book.txt --out run2"));
    assert!(again.stderr.contains("prepared before in runs/.data/"), "{}", again.stderr);
    assert!(place.weights("run") == place.weights("run2"));
    // the run can be resumed, and repeated, without the text
    std::fs::remove_file(place.path("book.txt")).unwrap();
    place.does("train --resume run --steps 8");
    place.does("train --config run2/config.toml --out run3");
    place.does("generate --model run --tokens 5 --prompt Ivy");
}

#[test]
fn a_vocabulary_of_ones_own_goes_all_the_way() {
    let place = Place::new();
    place.write("book.txt", TEXT.repeat(200));
    place.does("tokenizer train book.txt --vocab-size 300 --out tok");
    let tiny = TINY.replace("vocab_size=256", "vocab_size=300");
    place.refuses(
        &format!("train {TINY} --data book.txt --tokenizer tok --out run"),
        &["the tokenizer has 300 tokens, the model only 256"],
    );
    place.does(&format!("train {tiny} --data book.txt --tokenizer tok --out run"));
    let json = place.read("tok/tokenizer.json");
    assert!(place.read("run/checkpoints/step-000006/tokenizer.json") == json);
    place.does("convert run hf");
    assert!(place.read("hf/tokenizer.json") == json);
    let text = place.does("generate --model hf --tokens 20 --prompt Ivy --seed 3").stdout;
    assert!(text.starts_with(b"Ivy"));
    place.does("train --init hf --data book.txt --batch 2 --seq 16 --steps 2 --sample-tokens 4 --out next");
    assert!(place.read("next/checkpoints/step-000002/tokenizer.json") == json);
    let without = tiny.replace("vocab_size=300", "vocab_size=400");
    place.write("small.txt", TEXT);
    place.refuses(
        &format!("train {without} --data small.txt --out other"),
        &["the model has 400 tokens, fewer than the tokenizer gpt2 with 50257"],
    );
}
