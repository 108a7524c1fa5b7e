//! `ironhorse fetch`, and names in the flags of other commands, against a hub on this machine. In debug builds only: there
//! the known files can be those of the test.
#![cfg(debug_assertions)]

use super::Place;
use super::place::Done;
use super::running::Running;
use super::server::{COMMIT, Fault, Hub, sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A text that stands for the real one.
const VERSES: &str = "To be, or not to be, that is the question.\n";

/// A place with a hub that has a small model as `gpt2`, and a known file.
struct Shop {
    place: Place,
    hub: Hub,
}

impl Shop {
    fn new() -> Self {
        let (place, hub) = (Place::with_run(), Hub::start());
        place.does("convert run hf");
        for entry in std::fs::read_dir(place.path("hf")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            hub.file("models/openai-community/gpt2", name, std::fs::read(&path).unwrap());
        }
        hub.file("models/openai-community/gpt2", "pytorch_model.bin", "not this");
        hub.moved("models/gpt2", "models/openai-community/gpt2");
        let text = VERSES.repeat(200);
        hub.file("", "/raw/input.txt", text.clone());
        let known = serde_json::json!([{
            "name": "tinyshakespeare",
            "file": "tinyshakespeare.txt",
            "address": format!("{}/raw/input.txt", hub.address()),
            "bytes": text.len(),
            "sha256": sha256(text.as_bytes()),
            "about": "verses",
        }]);
        place.write("known.json", known.to_string());
        Self { place, hub }
    }

    /// The variables of the commands here.
    fn variables(&self) -> Vec<(&'static str, String)> {
        let path = |name: &str| self.place.path(name).display().to_string();
        vec![
            ("HF_ENDPOINT", self.hub.address()),
            ("HF_HOME", path("hf-home")),
            ("IRONHORSE_CACHE", path("own")),
            ("IRONHORSE_KNOWN_FILES", path("known.json")),
        ]
    }

    fn command(&self, line: &str) -> Command {
        let mut command = self.place.command(line);
        for name in [
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_TOKEN",
            "HUGGINGFACE_HUB_CACHE",
            "HUGGING_FACE_HUB_TOKEN",
            "TRANSFORMERS_OFFLINE",
            "http_proxy",
            "HTTP_PROXY",
            "all_proxy",
            "ALL_PROXY",
        ] {
            command.env_remove(name);
        }
        command.envs(self.variables());
        command
    }

    fn does(&self, line: &str) -> Done {
        let done: Done = self.command(line).output().unwrap().into();
        assert_eq!(done.code, Some(0), "{line}: {}", done.stderr);
        done
    }

    fn refuses(&self, line: &str, texts: &[&str]) {
        let done: Done = self.command(line).output().unwrap().into();
        assert_eq!(done.code, Some(2), "{line}: {}", done.stderr);
        let error = done.stderr.lines().last().unwrap();
        assert!(
            error.starts_with("error: ") && texts.iter().all(|text| error.contains(text)),
            "{texts:?}: {error}"
        );
    }

    fn snapshot(&self) -> PathBuf {
        self.place.path("hf-home/hub/models--gpt2/snapshots").join(COMMIT)
    }
}

/// Lines that say that something is fetched.
fn fetches(done: &Done) -> Vec<&str> {
    done.stderr.lines().filter(|line| line.starts_with("fetch: ")).collect()
}

#[test]
fn the_first_line_of_a_newcomer_fine_tunes_gpt2_on_shakespeare() {
    let shop = Shop::new();
    let flags = "--steps 1 --batch 2 --seq 16 --val-batches 1 --sample-tokens 0";
    let done = shop.does(&format!("train --init gpt2 --data tinyshakespeare {flags} --out tuned"));
    let [model, data] = fetches(&done)[..] else { panic!("{}", done.stderr) };
    assert!(model.starts_with("fetch: gpt2, 3 files, ") && model.contains(&shop.hub.address()), "{model}");
    assert!(data.starts_with("fetch: tinyshakespeare, "), "{data}");
    let config = String::from_utf8(shop.place.read("tuned/config.toml")).unwrap();
    let init = format!("init = \"{}\"", shop.snapshot().display());
    assert!(config.contains(&init), "the exact weights, which `main` will not be for ever: {config}");
    // from then on there is no question to anybody
    shop.hub.seen();
    let offline = shop
        .command(&format!("train --init gpt2 --data tinyshakespeare {flags} --out again"))
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let again = Done::from(offline);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert!(fetches(&again).is_empty());
    assert_eq!(shop.place.losses("tuned"), shop.place.losses("again"));
    for line in [
        "generate --model gpt2 --tokens 3",
        "generate --model openai-community/gpt2 --tokens 3",
        "eval --model gpt2 --data tinyshakespeare",
        "convert gpt2 w.bin",
        "tokenizer show --tokenizer openai-community/gpt2 hi",
        "prepare tinyshakespeare --tokenizer openai-community/gpt2 --val-tail 0.1 --out prepared",
        "train --model openai-community/gpt2 --data tinyshakespeare --steps 1 --batch 2 --seq 16 --sample-tokens 0 --out more",
    ] {
        assert!(fetches(&shop.does(line)).is_empty(), "{line}");
    }
    assert!(shop.hub.seen().is_empty());
    shop.place.does("convert hf v.bin");
    assert!(shop.place.read("w.bin") == shop.place.read("v.bin"));
}

#[test]
fn a_path_is_never_a_question_to_a_server() {
    let shop = Shop::new();
    for (line, text) in [
        ("generate --model none", "none"),
        ("generate --model none/x.bin", "none/x.bin"),
        ("generate --model run/none", "run/none"),
        ("generate --model ./org/name", "org/name"),
        ("train --init none.bin --steps 1", "none.bin"),
        ("train --data none/x.txt --steps 1", "none/"),
        ("train --data org/name --steps 1", "org/"),
        ("train --model none --steps 1", "none"),
        ("convert none out.bin", "none"),
        ("tokenizer show --tokenizer none hi", "none"),
    ] {
        shop.refuses(line, &[text]);
    }
    shop.does("plan --model gpt2"); // sizes
    shop.does("tokenizer show --tokenizer gpt2 hi"); // part of the program
    assert!(shop.hub.seen().is_empty());
}

#[test]
fn what_cannot_be_fetched_is_said_in_a_line() {
    let shop = Shop::new();
    shop.refuses("fetch org/none", &["org/none: the hub has no such repository", "HF_TOKEN"]);
    shop.refuses("generate --model org/none", &["org/none", "there is no file or folder org/none either"]);
    shop.refuses("generate --model tinyshakespeare", &["tinyshakespeare is data, expected a model"]);
    shop.refuses("fetch a/b/c", &["`a/b/c` is not a repository"]);
    shop.refuses(
        "fetch gpt2 --file *.onnx",
        &["`gpt2` has no file *.onnx, it has config.json, model.safetensors"],
    );
    shop.refuses("fetch gpt2 tinyshakespeare --out x", &["--out is for one name"]);
    shop.refuses("fetch", &["<NAME>"]);
    shop.hub.wants_token("hf_secret");
    shop.refuses("fetch gpt2", &["refuses access (401", "HF_TOKEN", "licence", "/gpt2"]);
    let mut command = shop.command("fetch gpt2");
    let done: Done = command.env("HF_HUB_OFFLINE", "1").output().unwrap().into();
    let folder = shop.place.path("hf-home/hub/models--gpt2/snapshots/main");
    let advice = format!(
        "put config.json, model.safetensors and tokenizer.json from {}/gpt2/resolve/main/ into {}",
        shop.hub.address(),
        folder.display()
    );
    assert_eq!(
        done.stderr,
        format!("error: gpt2 is not in the cache, and HF_HUB_OFFLINE is set; {advice}\n")
    );
    std::fs::create_dir_all(shop.place.path("hf-home")).unwrap();
    shop.place.write("hf-home/token", "hf_secret\n");
    shop.does("fetch gpt2");
}

#[test]
fn fetch_says_where_and_copies() {
    let shop = Shop::new();
    let done = shop.does("fetch gpt2 --out plain --json f.json");
    assert_eq!(done.text(), format!("{}\n", shop.snapshot().display()));
    assert!(done.stderr.contains("gpt2: 3 files, ") && done.stderr.contains(" MB/s)"), "{}", done.stderr);
    for name in ["config.json", "model.safetensors", "tokenizer.bin"] {
        let copy = shop.place.path("plain").join(name);
        assert!(shop.place.read(&format!("plain/{name}")) == shop.place.read(&format!("hf/{name}")));
        assert!(!copy.is_symlink());
    }
    let report = shop.place.json("f.json");
    assert_eq!(report["fetched"][0]["commit"], COMMIT);
    assert_eq!(report["fetched"][0]["files"].as_array().unwrap().len(), 3);
    assert_eq!(report["bytes"], report["received"]);
    shop.place.does("generate --model plain --tokens 2");
    let done = shop.does("fetch gpt2 tinyshakespeare --json -");
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["fetched"][0]["received"], 0);
    assert!(
        done.stderr.contains("gpt2: 3 files, ") && done.stderr.contains("was there already"),
        "{}",
        done.stderr
    );
    assert!(
        Path::new(done.stderr.lines().last().unwrap()).ends_with("own/fetch/tinyshakespeare.txt"),
        "{}",
        done.stderr
    );

    let done = shop.does("fetch --list --json l.json");
    let row = |name: &str| done.text().lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("gpt2 ").contains(&format!("main is {}", &COMMIT[..8])), "{}", done.text());
    assert!(row("tinyshakespeare").contains("verses") && row("gpt2-xl").contains(" - "), "{}", done.text());
    assert_eq!(shop.place.json("l.json")[0]["name"], "tinyshakespeare");
    shop.refuses("fetch --list gpt2", &["--list"]);
}

#[cfg(target_os = "linux")]
#[test]
fn ctrl_c_leaves_a_part_that_the_next_command_completes() {
    use rustix::process::Signal;
    let shop = Shop::new();
    let weights = shop.place.read("hf/model.safetensors");
    let half = weights.len() / 2;
    shop.hub.fails("/blob/", [Fault::Hang(half)]);
    let part =
        shop.place.path("hf-home/hub/models--gpt2/blobs").join(format!("{}.incomplete", sha256(&weights)));
    let mut running = Running::spawn(&shop.place, shop.command("fetch gpt2"));
    running.wait_for("half of the weights", || part.metadata().is_ok_and(|meta| meta.len() == half as u64));
    running.signal(Signal::INT);
    let done = running.end();
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    assert!(done.stderr.ends_with("stopped; the same command goes on from here\n"), "{}", done.stderr);
    shop.hub.seen();
    shop.does("fetch gpt2");
    let blob = shop.hub.seen().into_iter().find(|seen| seen.line.starts_with("GET /blob/")).unwrap();
    assert_eq!((blob.headers["range"].clone(), blob.sent), (format!("bytes={half}-"), weights.len() - half));
    assert!(std::fs::read(shop.snapshot().join("model.safetensors")).unwrap() == weights);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_line_and_what_came_is_kept() {
    let shop = Shop::new();
    let text = vec![b'x'; 600_000];
    shop.hub.file("", "/raw/input.txt", text.clone());
    let mut known = shop.place.json("known.json");
    (known[0]["bytes"], known[0]["sha256"]) = (text.len().into(), sha256(&text).into());
    shop.place.write("known.json", known.to_string());
    let variables: Vec<String> =
        shop.variables().iter().map(|(name, value)| format!("{name}='{value}'")).collect();
    let script = format!(
        "export {}; export IRONHORSE_CACHE=disk/own HF_HOME=disk/hf\n\
         $BIN fetch tinyshakespeare; echo $?; ls disk/own/fetch; rm -r disk/own; $BIN fetch gpt2; echo $?",
        variables.join(" ")
    );
    let big = vec![0; 2_000_000];
    shop.hub.file("models/openai-community/gpt2", "model.safetensors", big);
    let Some(done) = super::disk::on_a_disk(&shop.place, "size=400k", &script) else { return };
    let errors: Vec<&str> = done.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [written, measured] = errors[..] else { panic!("{}", done.stderr) };
    assert!(written.contains("tinyshakespeare.txt.incomplete: the disk is full; make room"), "{written}");
    assert!(measured.contains("the disk is full: 1.9 MiB are needed, "), "{measured}");
    assert_eq!(done.text(), "2\ntinyshakespeare.txt.incomplete\n2\n");
}
