//! `--dpo`: preferences as training data.

use super::Place;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
const MODEL: &str = "--model hidden=32,layers=1,heads=2,kv_heads=1,ffn=32,vocab=256,context=64";
const TRAIN: &str = "train --chat --dpo --data p.jsonl --template t.jinja --batch 2 --seq 64 --accumulate 2 --sample-tokens 0 --warmup 2";

/// A question and two answers, as messages that have the question in common, or after a list of them, or as texts.
fn pair(i: usize) -> String {
    let (good, bad) = ("ab".repeat(1 + i % 4), "yz".repeat(1 + i % 3));
    let says = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
    let (asked, good_says, bad_says) =
        (says("user", &format!("say {i}")), says("assistant", &good), says("assistant", &bad));
    let line = match i % 3 {
        0 => format!(r#"{{"chosen": [{asked}, {good_says}], "rejected": [{asked}, {bad_says}]}}"#),
        1 => format!(r#"{{"prompt": [{asked}], "chosen": [{good_says}], "rejected": [{bad_says}]}}"#),
        _ => format!(r#"{{"prompt": "say {i}: ", "chosen": "{good}", "rejected": "{bad}"}}"#),
    };
    line + "\n"
}

/// A folder of a random model, a template and 20 pairs.
fn place() -> Place {
    let place = Place::new();
    place.write("t.jinja", TEMPLATE);
    place.write("p.jsonl", (0..20).map(pair).collect::<String>());
    place.does(&format!("train {MODEL} --steps 1 --seq 16 --sample-tokens 0 --out base"));
    place.does("convert base model");
    place
}

#[test]
fn a_model_learns_preferences_and_resumes_to_the_bit() {
    let place = place();
    for (name, flags) in [("full", "--lr 1e-3"), ("lora", "--lora 4 --lr 1e-2")] {
        let line = format!("{TRAIN} --init model {flags} --steps 16 --val-every 8");
        let done = place.does(&format!("{line} --out {name} --json {name}.json"));
        let said = [" pairs of ", "learned (", "more for validation", "measured how likely", ", accuracy "];
        assert!(said.iter().all(|said| done.stderr.contains(said)), "{}", done.stderr);
        let steps = place.metrics(name);
        let rewards = |at: usize| {
            let step = &steps[at];
            [step.rewards_chosen, step.rewards_rejected, step.reward_accuracy].map(Option::unwrap)
        };
        // at first the model is its own reference: all rewards are 0 and the loss is ln 2
        assert_eq!(rewards(0), [0.0; 3]);
        assert!((steps[0].loss - std::f32::consts::LN_2).abs() < 1e-6, "{}", steps[0].loss);
        assert!((steps[0].val_loss.unwrap() - std::f32::consts::LN_2).abs() < 1e-6);
        assert_eq!(steps[0].val_reward_accuracy, Some(0.0));
        let [chosen, rejected, accuracy] = rewards(15);
        assert!(
            chosen > rejected + 0.1 && accuracy == 1.0 && steps[15].loss < 0.65,
            "{name}: {:?}",
            rewards(15)
        );
        assert!(steps[15].val_loss < steps[0].val_loss && steps[15].val_reward_accuracy == Some(1.0));
        // stopped and resumed it is the same run
        place.does(&format!("{line} --save-every 6 --keep 0 --out cut-{name}"));
        for step in ["step-000012", "step-000016"] {
            std::fs::remove_dir_all(place.path(&format!("cut-{name}/checkpoints/{step}"))).unwrap();
        }
        place.does(&format!("train --resume cut-{name}"));
        assert_eq!(place.losses(&format!("cut-{name}")), place.losses(name));
        let file = if flags.contains("lora") { "adapter_model.safetensors" } else { "model.safetensors" };
        let weights = |run: &str| place.read(&format!("{}/{file}", place.last(run)));
        assert!(weights(&format!("cut-{name}")) == weights(name));
        place.refuses(&format!("train --resume cut-{name} --beta 0.2"), &["--beta cannot change"]);
    }
    // rewards are relative to the weights of the start: others are refused
    std::fs::remove_dir_all(place.path("cut-full/checkpoints/step-000016")).unwrap();
    place.does(&format!("train {MODEL} --steps 1 --seq 16 --seed 9 --sample-tokens 0 --out other"));
    std::fs::remove_dir_all(place.path("model")).unwrap();
    place.does("convert other model");
    let done = place.runs("train --resume cut-full");
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stderr.contains("model: has SHA-256"), "{}", done.stderr);
    assert!(done.stderr.contains("the weights that cut-full began with"), "{}", done.stderr);
}

#[test]
fn long_pairs_are_cut_and_said() {
    let place = place();
    let done = place.does(&format!("{TRAIN} --init model --seq 20 --steps 1 --val-fraction 0 --out run"));
    assert!(done.stderr.contains("of pairs longer than a row were cut by"), "{}", done.stderr);
    let done = place.does(&format!("{TRAIN} --init model --seq 17 --steps 1 --val-fraction 0 --out other"));
    assert!(
        done.stderr.contains(
            " left out: the question alone is too long, and an answer is all cut off (first: p.jsonl line "
        ),
        "{}",
        done.stderr
    );
    place.refuses(
        &format!("{TRAIN} --init model --seq 4 --steps 1 --val-fraction 0"),
        &[
            "p.jsonl: none of 20 pairs can be learned; 20 left out: the question alone is too long",
            "line 1)",
            "--seq",
        ],
    );
}

/// Two equal answers say nothing of which is better; two that are equal up to where they are cut say nothing any more.
#[test]
fn equal_answers_are_left_out_and_said() {
    let place = place();
    let equal = r#"{"prompt": "say: ", "chosen": "same", "rejected": "same"}"#.to_owned() + "\n";
    let late =
        format!(r#"{{"prompt": "say: ", "chosen": "{0}a", "rejected": "{0}b"}}"#, "m".repeat(40)) + "\n";
    let silent = r#"{"prompt": "say: ", "chosen": "a", "rejected": ""}"#;
    place.write("some.jsonl", pair(1) + &equal + &pair(2) + &equal + &late + silent);
    let train = |data: &str| {
        format!(
            "train --init model --chat --dpo --data {data} --template t.jinja --steps 1 --seq 64 --val-fraction 0 --sample-tokens 0"
        )
    };
    let done = place.does(&(train("some.jsonl") + " --out some"));
    for said in [
        "2 left out: chosen and rejected are equal (first: some.jsonl line 2)",
        "1 left out: the answers are too long, and differ only in what is cut off (first: some.jsonl line 5)",
    ] {
        assert!(done.stderr.contains(said), "{}", done.stderr);
    }
    place.write("equal.jsonl", equal.repeat(3));
    place.refuses(
        &train("equal.jsonl"),
        &[
            "equal.jsonl: none of 3 pairs can be learned; 3 left out: chosen and rejected are equal",
            "line 1)",
        ],
    );
}

#[test]
fn preferences_that_cannot_be_learned_are_refused() {
    let place = place();
    let train =
        |data: &str| format!("train --init model --chat --dpo --data {data} --template t.jinja --steps 1");
    place.write("chat.jsonl", r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    place.refuses(&train("chat.jsonl"), &["chat.jsonl: line 1", "has not both `chosen` and `rejected`"]);
    place.write("half.jsonl", pair(0) + r#"{"prompt": "a", "chosen": "b"}"#);
    place.refuses(&train("half.jsonl"), &["half.jsonl: line 2", "has not both"]);
    place.write("empty.jsonl", "\n");
    place.refuses(&train("empty.jsonl"), &["empty.jsonl: has no sample"]);
    place.refuses(&(train("p.jsonl") + " --mask none"), &["--mask none goes with chats"]);
    place.refuses(&(train("p.jsonl") + " --beta 0"), &["--beta"]);
    place.refuses(&(train("p.jsonl") + " --save-batches b.safetensors"), &["--save-batches writes no pairs"]);
    place.refuses("train --init model --chat --data p.jsonl --beta 0.1", &["--beta goes with --dpo"]);
    place.refuses("train --chat --dpo --data p.jsonl", &["--dpo", "give the model with --init"]);
    for flag in ["--dpo", "--beta 0.1"] {
        let name = flag.split(' ').next().unwrap();
        place.refuses(&format!("train {flag}"), &[&format!("{name} goes with --chat")]);
    }
}

#[test]
fn tune_learns_preferences_at_a_tenth_of_the_rate() {
    let place = place();
    place.write("model/chat_template.jinja", TEMPLATE);
    for (name, flags, rate) in [("run", "", "1e-5"), ("lora", "--lora 2", "2e-5")] {
        let done = place.does(&format!("tune model --data p.jsonl --dpo {flags} --steps 3 --out {name}"));
        assert!(done.stderr.contains(&format!("at --lr {rate}")), "{}", done.stderr);
        assert!(place.metrics(name).iter().all(|step| step.reward_accuracy.is_some()));
        let config = String::from_utf8(place.read(&format!("{name}/config.toml"))).unwrap();
        assert!(config.lines().any(|line| line == "dpo = true"), "{config}");
    }
    place.does("train --config run/config.toml --out again");
    assert_eq!(place.losses("again"), place.losses("run"));
}
