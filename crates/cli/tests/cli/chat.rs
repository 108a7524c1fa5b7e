//! `ironhorse train --chat` and `ironhorse tune`: lines of chat data as training data.

use super::Place;

const TEMPLATE: &str = "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
/// A llama of bytes.
const MODEL: &str = "--model hidden=32,layers=1,heads=2,kv_heads=1,ffn=32,vocab=256,context=64";
const TRAIN: &str = "train --chat --data c.jsonl --template t.jinja --batch 2 --seq 48 --sample-tokens 0 --lr 1e-2 --warmup 2";

fn chat(question: &str, answer: &str) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
    ) + "\n"
}

/// A folder of a random model, a template and 20 chats.
fn place() -> Place {
    let place = Place::new();
    place.write("t.jinja", TEMPLATE);
    let chats: String = (0..20).map(|i| chat(&format!("say {i}"), &"ab".repeat(1 + i % 4))).collect();
    place.write("c.jsonl", chats);
    place.does(&format!("train {MODEL} --steps 1 --seq 16 --sample-tokens 0 --out base"));
    place.does("convert base model");
    place
}

#[test]
fn a_model_learns_chats_and_resumes_to_the_bit() {
    let place = place();
    for (name, flags) in [("full", ""), ("lora", "--lora 4")] {
        let line = format!("{TRAIN} --init model {flags} --steps 24 --val-every 8");
        let done = place.does(&format!("{line} --out {name} --json {name}.json"));
        let said = [" samples, ", "learned (", "more for validation", "padding"];
        assert!(said.iter().all(|said| done.stderr.contains(said)), "{}", done.stderr);
        let report = place.json(&format!("{name}.json"));
        let [first, last] = ["first_val_loss", "last_val_loss"].map(|key| report[key].as_f64().unwrap());
        assert!(last < first, "{name}: {first} → {last}");
        // only what is a token is counted, not the padding
        let tokens: Vec<u64> = place.metrics(name).iter().map(|metrics| metrics.tokens.unwrap()).collect();
        assert!(tokens.iter().all(|&tokens| tokens <= 96) && tokens.iter().any(|&tokens| tokens < 96));
        // stopped and resumed it is the same run
        place.does(&format!(
            "{TRAIN} --init model {flags} --steps 24 --val-every 8 --save-every 10 --keep 0 --out cut-{name}"
        ));
        for step in ["step-000020", "step-000024"] {
            std::fs::remove_dir_all(place.path(&format!("cut-{name}/checkpoints/{step}"))).unwrap();
        }
        place.does(&format!("train --resume cut-{name}"));
        assert_eq!(place.losses(&format!("cut-{name}")), place.losses(name));
        let weights = |run: &str| {
            let last = place.last(run);
            let file = if flags.is_empty() { "model.safetensors" } else { "adapter_model.safetensors" };
            place.read(&format!("{last}/{file}"))
        };
        assert!(weights(&format!("cut-{name}")) == weights(name));
    }
    place.does("convert full folder");
    assert_eq!(place.read("folder/chat_template.jinja"), TEMPLATE.as_bytes()); // that of --template
    place.does("generate --model folder --tokens 3");
}

/// `config.json` of the base says where texts end; its checkpoints say so, too.
#[test]
fn texts_end_where_the_model_says() {
    let place = place();
    let tokens = |model: &str| {
        place.does(&format!(
            "generate --model {model} --prompt <u>say --tokens 12 --temperature 0 --json g.json"
        ));
        let tokens = place.json("g.json")["tokens"].as_array().unwrap().clone();
        tokens.iter().map(|token| token.as_u64().unwrap()).collect::<Vec<_>>()
    };
    let all = tokens("model");
    let end = all[2];
    let before = all.iter().position(|&token| token == end).unwrap();
    let mut config = place.json("model/config.json");
    config["eos_token_id"] = serde_json::json!([255, end]);
    config["pad_token_id"] = 7.into();
    place.write("model/config.json", config.to_string());
    assert_eq!(tokens("model"), all[..before]);
    place.write("model/generation_config.json", format!(r#"{{"eos_token_id": {}}}"#, all[0]));
    assert!(tokens("model").is_empty());
    place.does(&format!("{TRAIN} --init model --steps 1 --lr 1e-9 --out run"));
    let kept = place.json(&format!("{}/config.json", place.last("run")));
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        assert_eq!(kept[key], config[key], "{key}");
    }
    assert!(tokens("run").is_empty());
}

#[test]
fn epochs_become_steps_and_long_samples_are_cut() {
    let place = place();
    let done = place.does(&format!("{TRAIN} --init model --seq 13 --epochs 2 --val-fraction 0 --out run"));
    assert!(done.stderr.contains("longer than 13 tokens were cut by"), "{}", done.stderr);
    // 20 rows of one sample each, twice, in batches of 2
    assert_eq!(place.metrics("run").len(), 20);
    assert!(place.metrics("run").iter().all(|metrics| metrics.val_loss.is_none()));
    place.write("v.jsonl", chat("say 3", "abab"));
    place.does(&format!("{TRAIN} --init model --val-data v.jsonl --steps 2 --out other"));
    assert!(place.metrics("other")[0].val_loss.is_some());
}

/// What goes into a model without an error, and should not, is said once.
#[test]
fn doubtful_roles_and_templates_are_noted() {
    let place = place();
    let odd = chat("a", "b").replace("assistant", "user");
    place.write("odd.jsonl", chat("a", "b") + &odd + &chat("c", "d") + &odd);
    let done = place
        .does("train --init model --chat --data odd.jsonl --template t.jinja --steps 1 --val-fraction 0");
    let said = "odd.jsonl line 2 has two messages of the user in a row; 2 lines have roles out of order";
    assert_eq!(done.stderr.matches("out of order").count(), 1, "{}", done.stderr);
    assert!(done.stderr.contains(said), "{}", done.stderr);
    for said in [
        "t.jinja: writes nothing for add_generation_prompt",
        "t.jinja: writes no special token that is learned",
    ] {
        assert_eq!(done.stderr.matches(said).count(), 1, "{}", done.stderr);
    }
    let shown = place.does("data show --data odd.jsonl --tokenizer bytes --template t.jinja");
    assert!(
        shown.stderr.contains("line 2 has two messages") && shown.stderr.contains("1 line has"),
        "{}",
        shown.stderr
    );
    // no model is read where its run could not be kept
    std::fs::create_dir(place.path("taken")).unwrap();
    place.write("taken/notes.txt", "precious");
    place.write("model/config.json", "broken");
    place.refuses(
        "tune model --data c.jsonl --out taken",
        &["taken: folder is not a run and holds notes.txt"],
    );
}

#[test]
fn chats_that_cannot_be_learned_are_refused() {
    let place = place();
    place.write("empty.jsonl", "");
    place.write("role.jsonl", chat("a", "b").replace("user", "robot"));
    place.write("silent.jsonl", r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    let train = |data: &str| format!("train --init model --chat --data {data} --template t.jinja --steps 1");
    place.refuses(&train("empty.jsonl"), &["empty.jsonl: has no sample"]);
    place.refuses(&train("role.jsonl"), &["role.jsonl: line 1", "unknown role robot"]);
    place.refuses(
        &train("silent.jsonl"),
        &["silent.jsonl: --mask assistant leaves nothing to learn in any sample (samples: 1)", "data show"],
    );
    place.write("long.jsonl", chat(&"ab".repeat(40), "b"));
    place.refuses(&train("long.jsonl"), &["long.jsonl: every sample is longer than 64 tokens", "--seq"]);
    // a sample with nothing to learn in it fills no row
    let silent = String::from_utf8(place.read("silent.jsonl")).unwrap() + "\n";
    place.write("mixed.jsonl", chat("a", "b") + &silent.repeat(30));
    let done = place.does(&format!("{} --val-fraction 0 --batch 1 --out mixed", train("mixed.jsonl")));
    assert!(
        done.stderr.contains("; of 30 nothing is learned, and they are left out; in 1 rows of"),
        "{}",
        done.stderr
    );
    let two = r#"{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}"#;
    place.write("two.jsonl", chat("a", "b") + two);
    place.refuses(&train("two.jsonl"), &["two.jsonl: line 2 has both `messages` and `prompt`"]);
    place.write(
        "twice.jsonl",
        chat("a", "b").replace("\"role\": \"user\"", "\"role\": \"user\", \"role\": \"x\""),
    );
    place.refuses(&train("twice.jsonl"), &["twice.jsonl: line 1 has the key `role` twice"]);
    place.refuses(&train("none.jsonl"), &["none.jsonl"]);
    place.refuses(&train("-"), &["--data -", "give a file"]);
    place.refuses("train --init model --chat --data c.jsonl", &["c.jsonl: line 1", "has no chat template"]);
    place.refuses(&(train("c.jsonl") + " --seq 65"), &["--seq 65", "context of 64"]);
    place.refuses("train --init model --chat", &["--chat needs the chats"]);
    for flag in ["--mask none", "--template t.jinja", "--val-fraction 0.1", "--epochs 2"] {
        let name = flag.split(' ').next().unwrap();
        place.refuses(&format!("train {flag}"), &[&format!("{name} goes with --chat")]);
    }
}

#[test]
fn tune_chooses_what_is_not_given() {
    let place = place();
    place.write("model/chat_template.jinja", TEMPLATE);
    let done = place.does("tune model --data c.jsonl --val-fraction 0.2 --out run --json run.json");
    let said = [
        "tunes all ",
        "f32, at --lr 1e-4",
        " tokens count in 3.0 epochs of ",
        " samples, 1 x 1 x 64 a step",
        "; about ",
    ];
    assert!(said.iter().all(|said| done.stderr.contains(said)), "{}", done.stderr);
    let config = String::from_utf8(place.read("run/config.toml")).unwrap();
    for line in [
        "chat = true",
        "seq = 64",
        "batch = 1",
        "weight-decay = 0.0",
        "val-every = 1",
        "mask = \"assistant\"",
    ] {
        assert!(config.lines().any(|found| found == line), "{line}: {config}");
    }
    // two fixed prompts, each up to where the model speaks
    let sample = place.json("run.json")["sample"].as_str().unwrap().to_owned();
    assert_eq!(sample.matches("<u>say ").count(), 2, "{sample}");
    assert_eq!(sample.matches("\n--------\n").count(), 1, "{sample}");
    // what is given stays
    let flags = "--batch 2 --seq 48 --accumulate 3 --lr 1e-3 --weight-decay 0.2 --steps 4 --prompt hello --recompute full --lora 2";
    let done = place.does(&format!("tune model --data c.jsonl {flags} --out other --json other.json"));
    assert!(done.stderr.contains("adapters of rank 2 on q,k,v,o,gate,up,down"), "{}", done.stderr);
    let config = String::from_utf8(place.read("other/config.toml")).unwrap();
    for line in ["batch = 2", "seq = 48", "accumulate = 3", "steps = 4", "recompute = \"full\"", "lora = 2"] {
        assert!(config.lines().any(|found| found == line), "{line}: {config}");
    }
    assert!(place.json("other.json")["sample"].as_str().unwrap().starts_with("<u>hello"));
    // checkpoints have the template, with adapters, too, and so have folders that are made of them
    place.does("convert other merged");
    for folder in [&place.last("run"), &place.last("other"), "merged"] {
        assert_eq!(place.read(&format!("{folder}/chat_template.jinja")), TEMPLATE.as_bytes(), "{folder}");
    }
    // and answers
    let answer = place.does("generate --model run --chat --prompt say --tokens 3 --json a.json").stdout;
    assert!(!answer.starts_with(b"say"), "{answer:?}");
    assert_eq!(place.json("a.json")["prompt"], "say");
    place.refuses("generate --model run --chat", &["--chat needs --prompt"]);
    place.refuses("generate --model model --system x", &["--chat"]);
    place.refuses("generate --model base --chat --prompt a", &["chat template"]);
    // a run of tune is a run
    place.does("tune --resume other --steps 5");
    assert_eq!(place.metrics("other").len(), 5);
    place.does("train --config run/config.toml --out again");
    assert_eq!(place.losses("again"), place.losses("run"));
}

#[test]
fn tune_says_what_it_cannot_tune() {
    let place = place();
    place.write("book.txt", "a book");
    place.refuses("tune --data c.jsonl", &["tune needs a model"]);
    place.refuses("tune model", &["tune needs the chats to learn: --data chat.jsonl"]);
    place.refuses(
        "tune model --data book.txt",
        &["book.txt: chats are lines of JSON", "train --init model --data book.txt"],
    );
    place.refuses("tune model --data c.jsonl", &["c.jsonl: line 1", "has no chat template"]);
    place.refuses("tune no/such/model --data c.jsonl", &["no/such/model"]);
}
