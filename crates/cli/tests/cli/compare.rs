//! `ironhorse compare`

use super::Place;

/// A log with these validation losses, one every ten steps.
fn log(losses: &[f32]) -> String {
    let line = |(at, loss): (usize, &f32)| {
        format!(
            r#"{{"step":{},"loss":{loss},"val_loss":{loss},"lr":0.1,"ms":10,"tokens_per_s":1000}}"#,
            10 * at
        ) + "\n"
    };
    losses.iter().enumerate().map(line).collect()
}

#[test]
fn a_run_is_on_track_behind_or_ahead() {
    let place = Place::new();
    place.write("reference.jsonl", log(&[5.0, 4.0, 3.0, 2.5, 2.0]));
    place.write("same.jsonl", log(&[5.0, 4.01, 2.99]));
    place.write("worse.jsonl", log(&[5.0, 4.0, 3.5, 3.5]));
    place.write("better.jsonl", log(&[5.0, 3.0, 2.0]));
    let last = |name: &str, code: i32| {
        let done = place.runs(&format!("compare {name} reference.jsonl --svg out.svg --json out.json"));
        assert_eq!(done.code, Some(code), "{}", done.stderr);
        assert!(place.path("out.svg").exists());
        let report = place.json("out.json");
        assert_eq!(report["on_track"], code == 0);
        assert_eq!(report["losses"], "validation");
        report["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(last("same.jsonl", 0), "on track: 0.0100 nats lower at step 20, within 0.02 since step 0");
    assert_eq!(
        last("worse.jsonl", 1),
        "not on track: 1.0000 nats (40.0 %) higher at step 30, by more than 0.02 since step 20; the reference was there at step 20"
    );
    let ahead = last("better.jsonl", 0);
    assert!(ahead.starts_with("ahead: 1.0000 nats (33.3 %) lower at step 20"), "{ahead}");
    assert!(
        ahead.ends_with(
            "the reference's lowest loss, 2.0000 at step 40: the run had it at step 20, 0.50 times as far"
        ),
        "{ahead}"
    );
    // a wider tolerance
    place.does("compare worse.jsonl reference.jsonl --tolerance 1 --svg out.svg");
}

#[test]
fn a_run_folder_gets_the_picture_and_the_settings_that_differ() {
    let place = Place::with_run();
    let again = super::place::TINY.replace("--steps 6", "--steps 6 --lr 1e-5");
    place.does(&format!("train {again} --out other"));
    let done = place.runs("compare other run --tolerance 0.001");
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    let text = done.text();
    assert!(text.contains("lr") && text.contains("0.00001"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("not on track: "), "{text}");
    assert!(place.path("other/compare.svg").exists() && !place.path("run/compare.svg").exists());
    // and is no foreign file there
    place.does(&format!("train {again} --out other --overwrite"));
    place.does("compare other other --by tokens --loss training");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let place = Place::with_run();
    place.write("empty.jsonl", "");
    place.write("bad.jsonl", "{}\n");
    place.refuses("compare run nothing.jsonl", &["nothing.jsonl"]);
    place.refuses("compare run empty.jsonl", &["empty.jsonl", "without a loss"]);
    place.refuses("compare run bad.jsonl", &["bad.jsonl", "line 1"]);
    place.refuses("compare . run", &["a run folder"]);
    place.refuses("compare run run --svg no/such/folder/x.svg", &["x.svg"]);
    place.refuses("compare run", &["REFERENCE"]);
}
