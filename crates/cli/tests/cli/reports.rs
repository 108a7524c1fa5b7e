//! The output and files of bench, profile, plan, doctor and --help.

use super::Place;
use serde_json::Value;

const SMALL: &str =
    "--model n_layer=2,n_head=2,n_embd=32,vocab_size=100,max_seq_len=16 --batch 2 --seq 8 --threads 1";

fn assert_fields(value: &Value, fields: &[&str]) {
    for field in fields {
        assert!(!value[field].is_null(), "{field} is missing in {value}");
    }
}

#[test]
fn bench_keeps_its_contract() {
    let place = Place::new();
    place.does(&format!("bench {SMALL} --steps 3 --warmup 1 --json b.json"));
    let report = place.json("b.json");
    assert_fields(
        &report,
        &["model", "device", "dtype", "ms_per_step", "tokens_per_s", "of_measured_peak", "peak_bytes"],
    );
    assert_fields(&report, &["loss", "version", "commit", "hardware", "ms_mean", "gb_per_s_possible"]);
    assert_eq!((&report["fast"], &report["attention"]), (&false.into(), &"auto".into()));
    // the peak of a CPU is not known from a data sheet, so MFU is not reported
    assert_eq!((&report["gpu"], report.get("mfu")), (&Value::Null, Some(&Value::Null)));
    assert_eq!(report["memory_use"].as_object().map(|all| all.contains_key("activations")), Some(true));
    assert_eq!((&report["batch"], &report["seq"], &report["steps"]), (&2.into(), &8.into(), &3.into()));
    assert_eq!((&report["device"], &report["dtype"]), (&"cpu".into(), &"f32".into()));
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    let steps: Vec<f64> =
        report["step_ms"].as_array().unwrap().iter().map(|ms| ms.as_f64().unwrap()).collect();
    assert_eq!(steps.len(), 3);
    assert!(
        steps.contains(&report["ms_per_step"].as_f64().unwrap()),
        "the median is one of three: {steps:?}"
    );
    let source = if cfg!(target_os = "linux") { "process" } else { "plan" };
    assert_eq!((&report["peak_source"], &report["threads"]), (&source.into(), &1.into()));
    let number = |field: &str| report[field].as_f64().unwrap();
    assert!(number("ms_per_step") > 0.0 && number("of_measured_peak") > 0.0 && number("peak_bytes") > 0.0);
    assert!(number("first_step_ms") > 0.0 && number("startup_s") * 1e3 > number("first_step_ms"));
    let speed = 16.0 / number("ms_per_step") * 1e3;
    assert!((number("tokens_per_s") / speed - 1.0).abs() < 1e-6);
    let losses: Vec<f64> = report["losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect();
    assert_eq!((losses.len(), losses[3]), (4, number("loss")));
    assert!((losses[0] - 100_f64.ln()).abs() < 0.3, "a random start knows nothing: {losses:?}");
    assert!(losses[3] < losses[0]);
}

/// What is not padding counts, and only that.
#[test]
fn bench_packs_documents() {
    let place = Place::new();
    let text = place.does(&format!("bench {SMALL} --documents 3 --steps 1 --warmup 0 --json b.json")).text();
    let report = place.json("b.json");
    let packed = |field: &str| report["packed"][field].as_f64().unwrap();
    let (tokens, ms) = (packed("tokens"), report["ms_per_step"].as_f64().unwrap());
    assert!(tokens > 8.0 && tokens <= 16.0, "{report}");
    assert!((packed("padding") - (1.0 - tokens / 16.0)).abs() < 1e-9);
    assert!((report["tokens_per_s"].as_f64().unwrap() * ms / 1e3 / tokens - 1.0).abs() < 1e-6);
    assert!(text.contains(&format!("{tokens} tokens of {} documents a step", packed("documents"))), "{text}");
    place.does(&format!("profile {SMALL} --documents 3 --steps 1 --warmup 0"));
    place.refuses(&format!("bench {SMALL} --documents 3 --generate"), &["--documents", "--generate"]);
    place.refuses(&format!("bench {SMALL} --documents 3 --data x"), &["--documents", "--data"]);
}

#[test]
fn bench_accumulates_micro_steps() {
    let place = Place::new();
    let run = |flags: &str| {
        let text = place.does(&format!("bench {SMALL} --steps 2 --warmup 0 --json b.json {flags}")).text();
        (text, place.json("b.json"))
    };
    let (text, many) = run("--accumulate 3");
    let (_, one) = run("");
    assert!(text.contains("× 3 micro-steps"), "{text}");
    assert_eq!((many["accumulate"].as_u64(), one["accumulate"].as_u64()), (Some(3), Some(1)));
    let work =
        |report: &Value, of: &str| report[of].as_f64().unwrap() * report["ms_per_step"].as_f64().unwrap();
    let tokens = work(&many, "tokens_per_s") / work(&one, "tokens_per_s");
    assert!((tokens - 3.0).abs() < 1e-6, "{tokens} times the tokens of a step");
    let flops = work(&many, "gflops") / work(&one, "gflops");
    assert!(flops > 2.0 && flops < 3.0, "{flops} times the operations: the update is done once");
    // three times the same batch is the same mean
    let loss = |report: &Value| report["losses"][1].as_f64().unwrap();
    assert!((loss(&many) - loss(&one)).abs() < 1e-4 * loss(&one), "{many} {one}");
    place.refuses(&format!("bench {SMALL} --accumulate 0"), &["--accumulate"]);
    place.refuses(&format!("bench {SMALL} --accumulate 2 --generate"), &["--accumulate", "--generate"]);
}

#[test]
fn bench_runs_as_long_as_asked() {
    let place = Place::new();
    place.does(&format!("bench {SMALL} --steps 1 --warmup 0 --seconds 0.2 --json b.json"));
    let report = place.json("b.json");
    let steps = report["step_ms"].as_array().unwrap();
    let total: f64 = steps.iter().map(|ms| ms.as_f64().unwrap()).sum();
    assert!(total >= 200.0 && steps.len() > 1, "{total} ms in {} steps", steps.len());
    assert_eq!(report["steps"], steps.len());
    place.refuses(&format!("bench {SMALL} --seconds -1"), &["--seconds"]);
}

#[test]
fn profile_writes_a_trace_of_one_step() {
    let place = Place::new();
    let text = place
        .does(&format!("profile {SMALL} --steps 1 --warmup 0 --top 2 --trace t.json --json p.json"))
        .text();
    assert!(text.contains(" more ") && text.contains("t.json"), "{text}");
    let ops = place.json("p.json")["ops"].as_array().unwrap().len();
    let trace = place.json("t.json");
    let events = trace["traceEvents"].as_array().unwrap();
    let on = |track: u64| {
        events.iter().filter(|event| event["ph"] == "X" && event["tid"] == track).collect::<Vec<_>>()
    };
    let names: Vec<&str> = on(1).iter().map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["forward", "backward", "update"]);
    assert_eq!((on(2).len(), on(3).len()), (ops, 0), "the CPU engine times ops, not kernels");
    assert!(on(2).iter().any(|event| event["name"].as_str().unwrap().ends_with(" h.1.mlp.c_fc")));
    for pair in on(2).windows(2) {
        let end = pair[0]["ts"].as_f64().unwrap() + pair[0]["dur"].as_f64().unwrap();
        assert!(end <= pair[1]["ts"].as_f64().unwrap() + 1e-6, "ops follow each other: {pair:?}");
    }
}

#[test]
fn profile_shows_what_ranks_exchange() {
    let place = Place::new();
    let text = place.does(&format!("profile {SMALL} --ranks 2 --steps 1 --warmup 0 --json p.json")).text();
    assert!(text.contains("2 ranks exchange for "), "{text}");
    let exchanged = place.json("p.json")["exchanged"].clone();
    assert_eq!(
        (&exchanged["ranks"], &exchanged["hidden_ms"]),
        (&Value::from(2), &Value::from(0.0)),
        "one thread does both"
    );
    assert!(exchanged["ms"].as_f64().unwrap() > 0.0, "{exchanged}");
    place.refuses(&format!("profile {SMALL} --shard grads"), &["--ranks N"]);
    place.refuses(&format!("profile {SMALL} --ranks 2 --seconds 1"), &["--seconds", "--steps"]);
}

#[test]
fn profile_accounts_for_every_op() {
    let place = Place::new();
    let text = place.does(&format!("profile {SMALL} --steps 2 --warmup 0 --json p.json")).text();
    assert!(text.contains("linear_bwd_weight") && text.contains("h.1"), "{text}");
    let report = place.json("p.json");
    assert_fields(&report, &["model", "ms", "gflops_possible", "gb_per_s_possible", "version", "commit"]);
    let calls = |list: &str| -> u64 {
        report[list].as_array().unwrap().iter().map(|group| group["calls"].as_u64().unwrap()).sum()
    };
    let ops = report["ops"].as_array().unwrap();
    assert_eq!((calls("by_kind"), calls("by_layer")), (ops.len() as u64, ops.len() as u64));
    assert_fields(&ops[0], &["op", "origin", "section", "ms", "gflops", "gb_per_s", "of_possible"]);
    let shares: f64 =
        report["by_kind"].as_array().unwrap().iter().map(|group| group["share"].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{shares}");
    assert_eq!((calls("by_section"), calls("by_kernel")), (ops.len() as u64, ops.len() as u64));
    assert_fields(&report, &["tokens_per_s", "of_measured_peak", "top_kernel", "memory_use"]);
    assert_eq!(report.get("mfu"), Some(&Value::Null));
}

#[test]
fn plan_adds_up_and_recomputing_saves_memory() {
    let place = Place::new();
    let total = |recompute: &str| {
        place.does(&format!("plan {SMALL} --recompute {recompute} --json p.json"));
        let report = place.json("p.json");
        assert_fields(
            &report,
            &["model", "parameters", "ops", "flops", "least_ms", "activation_lower_bound"],
        );
        let pools: u64 = report["bytes"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
        let total = report["total_bytes"].as_u64().unwrap();
        assert_eq!(pools, total);
        total
    };
    let (none, gelu, full) = (total("none"), total("gelu"), total("full"));
    assert!(full < gelu && gelu < none, "{full} {gelu} {none}");
    let levels = |report: &serde_json::Value| -> Vec<(String, u64)> {
        let choices = report["choices"].as_array().unwrap().iter();
        choices
            .map(|c| (c["recompute"].as_str().unwrap().into(), c["total_bytes"].as_u64().unwrap()))
            .collect()
    };
    let want = [("none", none), ("gelu", gelu), ("full", full)].map(|(name, bytes)| (name.to_owned(), bytes));
    assert_eq!(levels(&place.json("p.json")), want);
}

#[test]
fn the_largest_mixture_is_planned_for_one_gpu() {
    let place = Place::new();
    let text = place
        .does("plan --model moe-6.9b --batch 8 --seq 1024 --dtype bf16 --recompute experts --json p.json");
    let report = place.json("p.json");
    assert_eq!(report["parameters"], 6_882_678_528_u64);
    assert_eq!(report["active_parameters"], 1_786_599_168_u64);
    assert!(report["total_bytes"].as_u64().unwrap() < 110 << 30, "{}", text.text());
    let sizes: Vec<u64> =
        report["choices"].as_array().unwrap().iter().map(|c| c["total_bytes"].as_u64().unwrap()).collect();
    assert!(sizes.len() == 16 && sizes[..4].is_sorted_by(|a, b| a > b), "{sizes:?}");
    assert_eq!(report["choices"][3]["total_bytes"], report["total_bytes"]);
}

/// The parts of a rank add up, state is divided by the world, and a step is the sum of its parts less what is hidden.
#[test]
fn plan_shows_a_rank_and_the_step_of_many() {
    let place = Place::new();
    let plan = |flags: &str| {
        let text = place
            .does(&format!("plan --model d12 --batch 4 --seq 1024 --threads 1 {flags} --json p.json"))
            .text();
        (text, place.json("p.json")["ranks"].clone())
    };
    assert!(plan("").1.is_null());
    let (text, eight) = plan("--gpus 8");
    for part in [
        "8 GPUs, 8 in each of 1 machines, --shard state",
        "weak scaling",
        "tree buffers",
        "while computing, which is 15 % slower",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let number = |value: &Value, name: &str| value[name].as_f64().unwrap();
    for rank in ["most", "least"].map(|rank| &eight[rank]) {
        let parts = ["weights", "gradients", "tree_buffers", "state", "activations", "other"];
        let sum: f64 = parts.iter().map(|part| number(rank, part)).sum();
        assert_eq!(sum, number(rank, "total"));
        assert!(number(rank, "receive_buffers") > 0.0);
    }
    let step = &eight["step"];
    let parts = ["forward_backward_ms", "sum_ms", "exchange_ms", "gather_ms", "update_ms"];
    let sum: f64 = parts.iter().map(|part| number(step, part)).sum();
    let hidden = number(step, "hidden_ms") * (1.0 - number(&eight["assumed"], "slows"));
    assert!(hidden > 0.0 && (sum - hidden - number(step, "step_ms")).abs() < 1e-6, "{step}");
    assert_eq!(number(step, "network_bytes"), 0.0);
    assert!(parts.iter().all(|part| number(step, part) > 0.0), "{step}");
    let (_, whole) = plan("--gpus 8 --shard none");
    let ratio = number(&whole["most"], "state") / number(&eight["most"], "state");
    assert!((7.0..=8.01).contains(&ratio), "{ratio}");
    let (_, levels) = plan("--gpus 8 --accumulate 32");
    assert_eq!(number(&levels["most"], "tree_buffers"), 2.0 * number(&levels["most"], "gradients"));
    let (_, many) = plan("--gpus 8 --nodes 4 --micro-step 50");
    assert_eq!((number(&many["step"], "forward_backward_ms"), &many["world"]), (50.0, &Value::from(32)));
    assert!(number(&many["step"], "exchange_ms") > 1.5 * number(step, "exchange_ms"));
    // a machine adds up first: of gradients and weights three quarters of an eighth leave it
    let (moved, gradients) = (number(&many["step"], "network_bytes"), number(&many["most"], "gradients"));
    assert!((0.09..0.2).contains(&(moved / gradients)), "{moved} of {gradients}");
    place.refuses(
        "plan --gpus 8 --accumulate 12",
        &["--accumulate, is 12", "expected a multiple of the 8 ranks"],
    );
    place.refuses("plan --gpus 8 --optimizer muon --shard state", &["muon", "--shard none"]);
    place.refuses("plan --gpus 6 --shard grads", &["is 6", "a power of two"]);
    place.refuses("plan --nodes 2", &["--gpus"]);
}

#[test]
fn plan_shows_every_choice_by_category_and_which_fit() {
    let place = Place::new();
    let flags =
        "--dtype bf16 --recompute experts --master residual --moments bf16 --memory 100GiB --threads 1";
    let text =
        place.does(&format!("plan --model moe-6.9b --batch 8 --seq 1024 {flags} --json p.json")).text();
    let report = place.json("p.json");
    let bytes = |choice: &serde_json::Value, name: &str| choice["bytes"][name].as_u64().unwrap();
    let choices = report["choices"].as_array().unwrap();
    let weights = bytes(&choices[0], "weights");
    let mut seen = std::collections::BTreeSet::new();
    for choice in choices {
        let names = ["recompute", "master", "moments"].map(|name| choice[name].as_str().unwrap());
        seen.insert(names);
        // the 16-bit residuals are as large as the weights
        assert_eq!(bytes(choice, "master"), if names[1] == "residual" { weights } else { 2 * weights });
        assert_eq!(bytes(choice, "moments"), if names[2] == "bf16" { 2 * weights } else { 4 * weights });
        let sum: u64 = ["weights", "master", "gradients", "moments", "activations", "other"]
            .map(|name| bytes(choice, name))
            .iter()
            .sum();
        assert_eq!(sum, choice["total_bytes"].as_u64().unwrap());
        // one GiB is reserved for the libraries on the GPU
        assert_eq!(choice["fits"], sum <= 99 << 30, "{choice}");
    }
    assert_eq!(seen.len(), 16);
    let fitting = choices.iter().filter(|choice| choice["fits"] == true).count();
    assert!(fitting > 3 && fitting < 13, "{fitting}");
    let asked = choices.iter().find(|c| c["total_bytes"] == report["total_bytes"]).unwrap();
    let names = ["recompute", "master", "moments"].map(|name| asked[name].as_str().unwrap());
    assert_eq!(names, ["experts", "residual", "bf16"]);
    assert_eq!([&report["master"], &report["moments"]], ["residual", "bf16"]);
    let marked: Vec<&str> = text.lines().filter(|line| line.starts_with("> ")).collect();
    assert!(marked.len() == 1 && marked[0].starts_with("> experts    residual  bf16"), "{text}");
    assert!(marked[0].ends_with("  fits") && text.contains("  does not fit"), "{text}");
    // state of f32 weights is f32: only levels are left to choose
    place.does(&format!("plan {SMALL} --json p.json"));
    assert_eq!(place.json("p.json")["choices"].as_array().unwrap().len(), 3);
}

#[test]
fn plan_shows_what_muon_saves() {
    let place = Place::new();
    let moments = |flags: &str| {
        place.does(&format!("plan {SMALL} {flags} --json p.json"));
        let report = place.json("p.json");
        let bytes = ["first moments", "second moments"].map(|name| report["bytes"][name].as_u64().unwrap());
        assert_eq!(report["choices"][0]["bytes"]["moments"].as_u64().unwrap(), bytes.iter().sum::<u64>());
        (report["optimizer"].as_str().unwrap().to_owned(), bytes)
    };
    let (adamw, [first, second]) = moments("");
    let (muon, [same, less]) = moments("--optimizer muon");
    assert_eq!((&*adamw, &*muon, first, second), ("adamw", "muon", same, same));
    // two layers of 12·32² weights
    assert_eq!(second - less, 4 * 2 * 12 * 32 * 32);
}

/// Two processes reach each other, time an exchange and check its sums.
#[test]
fn doctor_checks_ranks() {
    let place = Place::new();
    let done = place.does("doctor --ranks 2 --threads 1 --device cpu --json d.json");
    let text = done.text();
    for part in [
        "2 ranks by ironhorse --ranks",
        "each reaches each",
        "interface ",
        "connection of rank 1: 127.0.0.1:",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    assert!(at("connection of rank 1") < at("exchange: 64"), "who reaches whom comes first: {text}");
    let report = place.json("d.json");
    assert_eq!(report["world"], 2);
    for rank in report["ranks"].as_array().unwrap() {
        assert_fields(rank, &["rank", "host", "device", "version", "interfaces", "latency_us", "exchange"]);
        let exchange = &rank["exchange"];
        assert_eq!((&exchange["bytes"], &exchange["right"]), (&Value::from(64 << 20), &Value::from(true)));
        assert!(exchange["least_ms"].as_f64().unwrap() > 0.0 && exchange["gb_per_s"].as_f64().unwrap() > 0.0);
    }
    place.refuses("doctor --ranks", &["--ranks N starts N here"]);
    place.refuses("doctor --ranks 1", &["expected 2 or more"]);
    place.refuses("doctor --device cpu", &["--ranks"]);
}

#[test]
fn doctor_says_what_will_be_used() {
    let place = Place::new();
    let text = place.does("doctor --threads 1 --json d.json").text();
    assert!(text.contains("--device auto means cpu"), "{text}");
    let report = place.json("d.json");
    assert_fields(
        &report,
        &["version", "commit", "hardware", "gflops_possible", "gb_per_s_possible", "auto"],
    );
    assert_eq!((&report["threads"], &report["devices"][0]["available"]), (&1.into(), &true.into()));
    assert_fields(&report["hardware"], &["cpu", "cores", "isa", "system"]);
}

#[test]
fn bench_generate_times_tokens_and_names_their_kernels() {
    let place = Place::new();
    let model = "n_layer=2,n_head=2,n_embd=64,vocab_size=256,max_seq_len=32";
    for batch in [1, 3] {
        let command =
            format!("bench --device cpu --model {model} --generate --batch {batch} --seq 12 --json g.json");
        let text = place.does(&command).text();
        assert!(text.contains("tokens/s") && text.contains("of a copy"), "{text}");
        let report = place.json("g.json");
        assert_fields(&report, &["commit", "hardware", "ms_per_token", "of_copy_bandwidth", "weight_bytes"]);
        assert_eq!((&report["tokens"], &report["batch"]), (&12.into(), &batch.into()));
        let written = report["written"].as_array().unwrap().len();
        assert_eq!(written, if batch == 1 { 16 } else { 0 }, "4 tokens of warm-up, and 12");
        let kernels = report["kernels"].as_array().unwrap();
        assert!(kernels.iter().any(|kernel| kernel["name"] == "attention_cached" && kernel["calls"] == 2));
    }
    let command = format!("bench --device cpu --model {model} --generate --seq 29");
    place.refuses(&command, &["the 32 positions of the model"]);
}

#[test]
fn every_command_has_help_with_examples() {
    let place = Place::new();
    for command in [
        "train",
        "generate",
        "prepare",
        "tokenizer train",
        "tokenizer show",
        "verify",
        "bench",
        "profile",
        "plan",
        "convert",
        "doctor",
        "selftest",
    ] {
        let text = place.does(&format!("{command} --help")).text();
        assert!(text.contains("Examples:\n") && text.contains("Usage: ironhorse"), "{command}: {text}");
        assert!(text.contains("--config <FILE>"), "{command}");
        assert!(text.lines().all(|line| line.chars().count() <= 130), "{command}: {text}");
    }
    assert!(place.does("--help").text().contains("Exit code: 0 done"));
    assert_eq!(place.does("--version").text(), concat!("ironhorse ", env!("CARGO_PKG_VERSION"), "\n"));
}
