//! `ironhorse tokenizer`

use super::Place;

#[test]
fn a_text_token_by_token() {
    let place = Place::new();
    place.write("a.txt", "Hello world");
    let done = place.does("tokenizer show --file a.txt --ids --json t.json");
    let text = done.text();
    assert!(text.starts_with("Hello| world\n   15496    5 bytes  \"Hello\"\n"), "{text}");
    assert!(
        text.ends_with("2 tokens, 11 bytes, 5.50 bytes per token; gpt2 with 50257 tokens (byte-level BPE)\n"),
        "{text}"
    );
    assert_eq!(place.json("t.json")["tokens"][1]["id"], 995);
    let marked = place.does("tokenizer show <|endoftext|> --special --json -").text();
    let report: serde_json::Value = serde_json::from_str(&marked).unwrap();
    assert_eq!(report["tokens"][0]["id"], 50256);
    place.refuses("tokenizer show", &["no text to show"]);
    place.refuses("tokenizer show --file nope", &["nope: cannot read"]);
}

#[test]
fn a_vocabulary_is_trained_and_said() {
    let place = Place::new();
    place.write("a.txt", "one two three\n".repeat(50));
    let done = place.does("tokenizer train a.txt --vocab-size 270 --special <end> --out tok --json t.json");
    assert!(done.text().contains("tokens → tok/tokenizer.json"), "{}", done.text());
    assert!(
        place.does("tokenizer show --tokenizer tok <end> --special").text().contains("1 tokens, 5 bytes")
    );
    place.refuses("tokenizer train a.txt --vocab-size 100", &["--vocab-size is 100, expected at least 257"]);
    place.refuses("tokenizer train a.txt --split (", &["--split is not a regular expression"]);
    place.write("bad.jsonl", "oops\n");
    place.refuses("tokenizer train bad.jsonl", &["bad.jsonl: line 1 is not JSON"]);
    let few = place.does("tokenizer train a.txt --vocab-size 5000 --out few");
    assert!(few.text().contains("fewer than the 5000 asked for"), "{}", few.text());
}
