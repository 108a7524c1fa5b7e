//! Every kind of file, and what is refused. `python/tests/test_gguf.py` compares with transformers.

use super::*;
use crate::tokenizer::Tokenizer;

const TOLD: Told = Told { vocab_size: 262, ids: [None, Some(261)] };

fn files(named: &[(&str, &Value)]) -> NamedFiles {
    named.iter().map(|(name, json)| ((*name).to_owned(), json.to_string().into_bytes())).collect()
}

fn letters() -> Map<String, Value> {
    (0..=u8::MAX).map(|byte| (spell(&[byte]), byte.into())).collect()
}

fn byte_level() -> Value {
    let mut vocab = letters();
    vocab.extend([("ab".to_owned(), 256.into()), ("Ġab".to_owned(), 257.into())]);
    json!({
        "added_tokens": [{"id": 258, "content": "<s>", "special": true},
                         {"id": 259, "content": "<tool>", "special": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", ["Ġ", "ab"]]},
    })
}

fn made(files: &NamedFiles) -> GgufTokenizer {
    gguf_tokenizer(files, TOLD).unwrap().unwrap()
}

fn get<'a>(made: &'a GgufTokenizer, key: &str) -> &'a Meta {
    let found = made.keys.iter().find(|(name, _)| name.strip_prefix("tokenizer.").unwrap() == key);
    &found.unwrap_or_else(|| panic!("no {key}")).1
}

fn texts(meta: &Meta) -> &[String] {
    let Meta::Texts(texts) = meta else { panic!("{meta:?}") };
    texts
}

fn types(meta: &Meta) -> &[i32] {
    let Meta::I32s(types) = meta else { panic!("{meta:?}") };
    types
}

#[test]
fn byte_level_tokens_types_merges_and_markers() {
    let config = json!({"bos_token": {"content": "<s>"}, "chat_template": [
        {"name": "default", "template": "{{ a }}"}, {"name": "tool", "template": "{{ b }}"}]});
    let made = made(&files(&[(JSON_NAME, &byte_level()), (CONFIG_NAME, &config)]));
    assert_eq!((get(&made, "ggml.model"), get(&made, "ggml.pre")), (&"gpt2".into(), &"gpt-2".into()));
    let tokens = texts(get(&made, "ggml.tokens"));
    assert_eq!(tokens[255..], ["ÿ", "ab", "Ġab", "<s>", "<tool>", "[PAD260]", "[PAD261]"]);
    let types = types(get(&made, "ggml.token_type"));
    assert_eq!(types[255..], [NORMAL, NORMAL, NORMAL, CONTROL, USER_DEFINED, UNUSED, UNUSED]);
    assert_eq!(texts(get(&made, "ggml.merges")), ["a b", "Ġ ab"]);
    assert_eq!(get(&made, "ggml.bos_token_id"), &Meta::U32(258));
    assert_eq!(get(&made, "ggml.eos_token_id"), &Meta::U32(261)); // what the model says
    assert_eq!(get(&made, "ggml.add_bos_token"), &Meta::Bool(true));
    assert_eq!(get(&made, "ggml.add_eos_token"), &Meta::Bool(false));
    assert_eq!(get(&made, "chat_template"), &"{{ a }}".into());
    assert_eq!(get(&made, "chat_template.tool"), &"{{ b }}".into());
}

#[test]
fn settings_win_over_the_post_processor_and_a_file_over_settings() {
    let config = json!({"bos_token": "<s>", "add_bos_token": false, "chat_template": "old"});
    let mut files = files(&[(JSON_NAME, &byte_level()), (CONFIG_NAME, &config)]);
    assert_eq!(get(&made(&files), "chat_template"), &"old".into());
    files.push(("chat_template.jinja".into(), b"new".to_vec()));
    let made = made(&files);
    assert_eq!(get(&made, "ggml.add_bos_token"), &Meta::Bool(false));
    assert_eq!(get(&made, "chat_template"), &"new".into());
}

#[test]
fn pieces_have_scores_in_the_order_of_merges() {
    let vocab = json!({"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "▁": 4, "a": 5, "b": 6, "▁a": 7, "▁ab": 8, "ab": 9});
    let json = json!({
        "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true},
                         {"id": 2, "content": "</s>", "special": true}, {"id": 10, "content": "▁x", "special": false}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab,
                  "merges": ["▁ a", "a b", "▁a b", "▁ ab"]},
    });
    let told = Told { vocab_size: 11, ids: [Some(1), Some(2)] };
    let made = gguf_tokenizer(&files(&[(JSON_NAME, &json)]), told).unwrap().unwrap();
    assert_eq!((get(&made, "ggml.model"), get(&made, "ggml.pre")), (&"llama".into(), &"default".into()));
    let expected =
        [UNKNOWN, CONTROL, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, USER_DEFINED];
    assert_eq!(types(get(&made, "ggml.token_type")), expected);
    assert_eq!(texts(get(&made, "ggml.tokens"))[10], " x");
    let Meta::F32s(scores) = get(&made, "ggml.scores") else { panic!() };
    assert!(scores[7] > scores[9] && scores[9] > scores[8], "{scores:?}");
    assert!(scores[4..7].iter().all(|score| *score < scores[8]));
    assert_eq!(get(&made, "ggml.add_space_prefix"), &Meta::Bool(true));
}

#[test]
fn every_way_of_cutting_has_its_name() {
    let split = |regex: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})
    };
    let digits = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, {"type": "ByteLevel", "add_prefix_space": false}]});
    let name = |pre_tokenizer: &Value, is_whole: bool| {
        pre::name(&json!({"pre_tokenizer": pre_tokenizer, "model": {"ignore_merges": is_whole}}))
    };
    let cl100k = split(Pattern::CL100K.regex());
    assert_eq!(name(&cl100k, true).unwrap(), ("llama-bpe", None));
    assert_eq!(name(&cl100k, false).unwrap(), ("dbrx", None));
    assert!(name(&split(Pattern::CL100K_TAIL.regex()), true).unwrap().1.is_some());
    assert_eq!(name(&split(Pattern::QWEN2.regex()), false).unwrap().0, "qwen2");
    assert_eq!(name(&split(Pattern::QWEN_MARKS.regex()), false).unwrap().0, "qwen35");
    assert_eq!(name(&split(Pattern::O200k.regex()), false).unwrap().0, "gpt-4o");
    assert_eq!(name(&digits, false).unwrap().0, "smollm");
    assert!(name(&split("a+"), false).unwrap_err().contains("llama.cpp has no name"));
}

#[test]
fn files_of_llm_c_and_of_gpt2() {
    let bytes = made(&Tokenizer::bytes().files().unwrap());
    assert_eq!(
        texts(get(&bytes, "ggml.tokens"))[..34],
        {
            let mut first: Vec<String> = (0..=33u8).map(|byte| spell(&[byte])).collect();
            first.truncate(34);
            first
        }[..]
    );
    assert!(texts(get(&bytes, "ggml.merges")).is_empty());

    let mut vocab = letters();
    vocab.extend([("ab".to_owned(), 256.into()), ("<|endoftext|>".to_owned(), 257.into())]);
    let mut old = files(&[("vocab.json", &vocab.into())]);
    old.push(("merges.txt".into(), b"#version: 0.2\na b\n".to_vec()));
    let made = made(&old);
    assert_eq!(texts(get(&made, "ggml.merges")), ["a b"]);
    assert_eq!(types(get(&made, "ggml.token_type"))[256..258], [NORMAL, CONTROL]);

    let told = Told { vocab_size: 50304, ids: [Some(50256); 2] };
    let gpt2 = Tokenizer::open("gpt2").unwrap().files().unwrap();
    let gpt2 = gguf_tokenizer(&gpt2, told).unwrap().unwrap();
    assert_eq!(texts(get(&gpt2, "ggml.merges")).len(), 50000);
    assert_eq!(texts(get(&gpt2, "ggml.merges"))[0], "Ġ t");
    assert_eq!(texts(get(&gpt2, "ggml.tokens"))[50256..50258], ["<|endoftext|>", "[PAD50257]"]);
    assert_eq!(get(&gpt2, "ggml.eos_token_id"), &Meta::U32(50256));
    assert!(gguf_tokenizer(&Vec::new(), told).unwrap().is_none());
}

#[test]
fn what_llama_cpp_cannot_do_is_said_in_one_line() {
    let refusal = |change: fn(&mut Value)| {
        let mut json = byte_level();
        change(&mut json);
        gguf_tokenizer(&files(&[(JSON_NAME, &json)]), TOLD).unwrap_err().to_string()
    };
    let unigram = refusal(|json| json["model"]["type"] = "Unigram".into());
    assert!(
        unigram.starts_with("tokenizer tokenizer.json: its model is \"Unigram\", expected BPE"),
        "{unigram}"
    );
    assert!(refusal(|json| json["normalizer"] = json!({"type": "Lowercase"})).contains("Lowercase"));
    assert!(refusal(|json| json["pre_tokenizer"] = Value::Null).contains("llama.cpp has no name"));
    assert!(refusal(|json| json["model"]["merges"] = json!(["ab"])).contains("not two tokens"));
    assert!(refusal(|json| json["model"]["vocab"] = json!([])).contains("no model.vocab"));
    assert!(refusal(|json| json["model"]["vocab"]["zz"] = 262.into()).contains("262"));
    assert!(refusal(|json| json["added_tokens"][0]["content"] = "ab".into()).contains("twice"));
    let alone = vec![("tokenizer.model".to_owned(), vec![1])];
    assert!(gguf_tokenizer(&alone, TOLD).unwrap_err().to_string().contains("tokenizer.json beside it"));
    let broken = vec![(JSON_NAME.to_owned(), b"{".to_vec())];
    assert!(gguf_tokenizer(&broken, TOLD).unwrap_err().to_string().contains("is not JSON"));
    let mut template = files(&[(JSON_NAME, &byte_level())]);
    template.push(("chat_template.json".into(), b"[".to_vec()));
    assert!(
        gguf_tokenizer(&template, TOLD).unwrap_err().to_string().contains("chat_template.json is not JSON")
    );
}
