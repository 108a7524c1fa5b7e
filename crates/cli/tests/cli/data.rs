//! `ironhorse data show`

use super::Place;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;

#[test]
fn samples_are_shown_as_the_model_sees_them() {
    let place = Place::new();
    place.write("t.jinja", TEMPLATE);
    place.write("c.jsonl", format!("{CHAT}\n{{\"text\": \"hi\"}}\n{CHAT}\n"));
    let show = "data show --data c.jsonl --tokenizer bytes --template t.jinja";
    let text = place.does(&format!("{show} --count 2")).text();
    let want = "c.jsonl line 1: 20 tokens, 2 learned\n<user>a<assistant>⟦b.⟧\n     0..18     given   60 117 115 101 114 62 97 ";
    assert!(text.starts_with(want), "{text}");
    assert!(text.contains("\n    18..20     learned 98 46\n"), "{text}");
    assert!(text.contains("c.jsonl line 2: 3 tokens, 2 learned\n⟦hi␀⟧\n"), "{text}");
    assert!(text.ends_with("2 samples, 23 tokens, 4 learned (17.4 %)\n"), "{text}");
    let all = place.does(&format!("{show} --count 1 --whole --context 19 --json s.json")).text();
    let end = "3 samples, 41 tokens, 4 learned (9.8 %); 2 longer than 19 tokens were cut by 2 in all\n";
    assert!(all.contains("19 tokens, 1 learned, 1 more cut off") && all.ends_with(end), "{all}");
    let report = place.json("s.json");
    assert_eq!(
        (&report["samples"][0]["ids"][18], &report["samples"][0]["learned"][18]),
        (&98.into(), &true.into())
    );
    assert_eq!(report["samples"][0]["runs"][1]["text"], "b");
    assert_eq!((&report["template"], &report["counts"]["cut"]), (&"t.jinja".into(), &2.into()));
}

/// Text is shown as `train` sees it: documents, each after the token between them.
#[test]
fn documents_of_text_are_shown_with_their_boundaries() {
    let place = Place::new();
    place.write("a.txt", "abc");
    place.write("b.txt", " \n");
    place.write("c.txt", "defgh");
    let show = "data show --data a.txt b.txt c.txt --tokenizer bytes";
    let text = place.does(&format!("{show} --json t.json")).text();
    let want = "a.txt document 1: 4 tokens, all learned\n⟦␀⟧⟦abc⟧\n     0..1      between 0\n     1..4      learned 97 98 99\n";
    assert!(text.starts_with(want), "{text}");
    assert!(text.ends_with("2 documents, 10 tokens, all learned\n"), "{text}");
    let report = place.json("t.json");
    let runs = &report["samples"][1]["runs"];
    assert_eq!(
        (&runs[0]["boundary"], &runs[1]["start"], &runs[1]["end"]),
        (&true.into(), &1.into(), &6.into())
    );
    let cut = place.does(&format!("{show} --count 1 --context 2 --whole")).text();
    assert!(cut.starts_with("a.txt document 1: 4 tokens, all learned, the first 2 shown\n⟦␀⟧⟦a⟧\n"), "{cut}");
    assert!(cut.ends_with("2 documents, 10 tokens, all learned\n") && !cut.contains("c.txt"), "{cut}");
    let first = place.does(&format!("{show} --count 1")).text();
    assert!(first.ends_with("\n1 documents, 4 tokens, all learned\n"), "{first}");
    place.refuses(&format!("{show} --mask none"), &["a.txt: every token of plain text is trained on"]);
}

#[test]
fn what_cannot_be_shown_is_refused() {
    let place = Place::new();
    place.write("c.jsonl", CHAT);
    place.write("bad.jinja", "\n{{ messages.nothing() }}");
    place.write("broken.jinja", "\n{% if %}");
    place.write("empty.jsonl", "");
    let show = "data show --data c.jsonl --tokenizer bytes";
    place.refuses(show, &["c.jsonl: line 1", "tokenizer bytes: has no chat template", "--template FILE"]);
    place.refuses(
        &format!("{show} --template bad.jinja"),
        &["c.jsonl: line 1", "bad.jinja: line 2: `messages.nothing()`: "],
    );
    place.refuses(&format!("{show} --template broken.jinja"), &["broken.jinja: line 2"]);
    place.refuses(&format!("{show} --template none.jinja"), &["none.jinja: cannot read"]);
    place.refuses("data show --data none.jsonl --tokenizer bytes", &["none.jsonl"]);
    place.refuses("data show --data empty.jsonl --tokenizer bytes", &["empty.jsonl: has no sample"]);
    place.refuses(&format!("{show} --mask all"), &["--mask", "assistant, completion, none"]);
    place.refuses("data show --data c.jsonl", &["--tokenizer"]);
    place.refuses("data show --data c.jsonl --tokenizer nothing", &["nothing"]);
}
