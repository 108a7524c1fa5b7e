use super::*;
use proptest::prelude::*;
use std::path::Path;

fn write(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(folder.join(name), bytes).unwrap();
}

#[test]
fn known_ids_of_the_named_vocabularies() {
    // from tiktoken
    let known: [(&str, &str, &[u32]); 6] = [
        ("gpt2", "hello world", &[31373, 995]),
        ("r50k_base", "hello  world", &[31373, 220, 995]),
        ("p50k_base", "hello world", &[31373, 995]),
        ("cl100k_base", "hello world", &[15339, 1917]),
        ("cl100k_base", "tiktoken is great!", &[83, 1609, 5963, 374, 2294, 0]),
        ("o200k_base", "hello world", &[24912, 2375]),
    ];
    for (name, text, ids) in known {
        assert_eq!(Tokenizer::open(name).unwrap().encode(text.as_bytes()).unwrap(), ids, "{name}");
    }
}

#[test]
fn markers_in_a_text_are_text_unless_asked_for() {
    let gpt2 = Tokenizer::open("gpt2").unwrap();
    let text = b"a<|endoftext|>b";
    assert_eq!(gpt2.encode(text).unwrap().len(), 9);
    assert_eq!(gpt2.encode_as(text, Special::Tokens).unwrap(), [64, 50256, 65]);
    assert_eq!(gpt2.eot(), Some(50256));
}

#[test]
fn broken_utf8_is_replaced_and_counted_except_for_bytes() {
    let text = b"a\xff\xfeb\xe4\xb8";
    let mut out = Vec::new();
    assert_eq!(Tokenizer::bytes().encoder().encode(text, &mut out).unwrap(), 0);
    assert_eq!(out, text.map(u32::from));
    let gpt2 = Tokenizer::open("gpt2").unwrap();
    out.clear();
    assert_eq!(gpt2.encoder().encode(text, &mut out).unwrap(), 3);
    assert_eq!(gpt2.decode(&out).unwrap(), "a\u{fffd}\u{fffd}b\u{fffd}".as_bytes());
}

/// Every way to the same vocabulary gives the same ids.
#[test]
fn gpt2_in_every_kind_of_file() {
    let folder = tempfile::tempdir().unwrap();
    let gpt2 = Tokenizer::open("gpt2").unwrap();
    let text =
        "Ivy's 42 cats — aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n\n\t x 中文 😀"
            .as_bytes();
    let ids = gpt2.encode(text).unwrap();
    for (name, bytes) in gpt2.files().unwrap() {
        write(folder.path(), &name, &bytes);
        let again = Tokenizer::open_path(&folder.path().join(&name)).unwrap();
        assert_eq!((again.encode(text).unwrap(), again.eot()), (ids.clone(), Some(50256)), "{name}");
        assert_eq!(again.files().unwrap(), [(name, bytes)]);
    }
    // vocab.json and merges.txt out of the tokenizer.json
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.path().join(JSON_NAME)).unwrap()).unwrap();
    let merges: Vec<_> = json["model"]["merges"].as_array().unwrap().iter().collect();
    let lines: String =
        merges.iter().map(|m| format!("{} {}\n", m[0].as_str().unwrap(), m[1].as_str().unwrap())).collect();
    let mut vocab = json["model"]["vocab"].clone();
    vocab["<|endoftext|>"] = 50256.into();
    let hf = tempfile::tempdir().unwrap();
    write(hf.path(), "vocab.json", vocab.to_string().as_bytes());
    write(hf.path(), "merges.txt", format!("#version: 0.2\n{lines}").as_bytes());
    let again = Tokenizer::open(hf.path().to_str().unwrap()).unwrap();
    assert_eq!((again.encode(text).unwrap(), again.eot()), (ids, Some(50256)));
}

#[test]
fn other_tokenizers_go_to_the_crate() {
    let folder = tempfile::tempdir().unwrap();
    let json = r#"{"version": "1.0", "added_tokens": [{"id": 3, "content": "</s>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}], "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2, "</s>": 3}, "unk_token": "?"}}"#;
    write(folder.path(), "tokenizer.json", json.as_bytes());
    let tokenizer = Tokenizer::open(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(tokenizer.method(), "the tokenizers crate");
    assert_eq!((tokenizer.vocab_size(), tokenizer.eot()), (4, Some(3)));
    assert_eq!(tokenizer.encode(b"A b c").unwrap(), [0, 1, 2]);
    assert_eq!(tokenizer.encode_as(b"a </s>", Special::Tokens).unwrap(), [0, 3]);
    assert_eq!(tokenizer.decode(&[0, 1]).unwrap(), b"a b");
    assert_eq!(tokenizer.files().unwrap()[0].1, json.as_bytes());
    assert_eq!(tokenizer.safe_cut(b"a b"), None);
}

#[test]
fn what_is_not_a_tokenizer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let open =
        |name: &str| Tokenizer::open(folder.path().join(name).to_str().unwrap()).unwrap_err().to_string();
    assert!(open("").contains("has no tokenizer, expected one of tokenizer.json"));
    let text = Tokenizer::open("gpt5").unwrap_err().to_string();
    assert_eq!(
        text,
        "tokenizer gpt5: is neither a known name nor a file, expected bytes, gpt2, p50k_base, cl100k_base, \
         o200k_base, a file or a folder"
    );
    write(folder.path(), "a.json", b"{\"model\": 3}");
    assert!(open("a.json").contains("expected a tokenizer.json"), "{}", open("a.json"));
    write(folder.path(), "tokenizer.model", b"\n\x0e\n\x05<unk>");
    assert!(open("tokenizer.model").contains("SentencePiece"));
    write(folder.path(), "vocab.json", b"[]");
    assert!(open("vocab.json").contains("merges.txt"));
    write(folder.path(), "merges.txt", b"a");
    assert!(open("vocab.json").contains("object of tokens"));
    let mut gpt2 = Tokenizer::open("gpt2").unwrap();
    assert!(gpt2.set_eot("</s>").unwrap_err().to_string().contains("no special token `</s>`"));
    gpt2.set_eot("220").unwrap();
    assert_eq!(gpt2.eot(), Some(220));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    #[test]
    fn ids_decode_to_the_text_and_do_not_depend_on_the_cache(text in "\\PC{0,200}") {
        thread_local!(static ALL: Vec<Tokenizer> =
            ["gpt2", "cl100k_base", "o200k_base"].map(|name| Tokenizer::open(name).unwrap()).into());
        ALL.with(|all| for tokenizer in all {
            let ids = tokenizer.encode(text.as_bytes()).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
            let mut encoder = tokenizer.encoder();
            for _ in 0..2 {
                let mut again = Vec::new();
                encoder.encode(text.as_bytes(), &mut again).unwrap();
                assert_eq!(again, ids);
            }
        });
    }
}
