//! `ironhorse convert`

use super::Place;

#[test]
fn there_and_back_are_the_same_bytes() {
    let place = Place::with_run();
    place.does("convert run a.bin");
    place.does("convert a.bin hf");
    place.does("convert hf b.bin");
    assert!(place.read("a.bin") == place.read("b.bin"));
    assert!(place.read("hf/model.safetensors") == place.weights("run"));

    let done = place.does("convert a.bin a16.bin --dtype bf16");
    assert_eq!(done.text(), "a16.bin: 21984 parameters as bf16\n");
    place.does("convert a16.bin hf16 --dtype bf16");
    place.does("convert hf16 b16.bin --dtype bf16");
    assert!(place.read("a16.bin") == place.read("b16.bin"));
    assert_eq!(place.read("a.bin").len() - 1024, 2 * (place.read("a16.bin").len() - 1024));
}

#[test]
fn a_single_safetensors_file_is_refused_and_a_mixture_is_sent_to_a_folder() {
    let place = Place::with_run();
    place.refuses("convert run y.safetensors", &["y.safetensors", "name a folder"]);
    let model = "hidden=16,layers=1,heads=2,experts=3,top_k=1,ffn=8,vocab=256,context=16";
    place.does(&format!("train --model {model} --batch 2 --seq 16 --steps 1 --sample-tokens 0 --out moe"));
    let refused = place.runs("convert moe moe.bin");
    assert_eq!(
        refused.stderr,
        "error: moe.bin: llm.c's .bin holds a GPT-2 only, not a model of kind moe; name a Hugging Face folder, without .bin\n"
    );
    place.does("convert moe moe-folder");
}

/// A tokenizer with more tokens than the model goes along, as of some published models, but not without a word.
#[test]
fn a_tokenizer_that_is_too_large_is_said() {
    let place = Place::with_run();
    place.does("convert run hf");
    let done = place.does("convert hf same");
    assert!(!done.stderr.contains("tokenizer"), "{}", done.stderr);
    let small = "hidden=16,layers=1,heads=2,kv_heads=1,ffn=8,vocab=250,context=16";
    place.shard("s.bin", &(0..400).map(|i| i % 250).collect::<Vec<u32>>());
    place.does(&format!("train --model {small} --batch 2 --seq 16 --steps 1 --data s.bin --out small"));
    place.does("convert small small-hf");
    place.write("small-hf/tokenizer.bin", place.read("hf/tokenizer.bin"));
    let done = place.does("convert small-hf larger");
    let said =
        "small-hf/tokenizer.bin: the tokenizer has 256 tokens, the model only 250; it is copied as it is";
    assert!(done.stderr.contains(said), "{}", done.stderr);
    assert!(place.read("larger/tokenizer.bin") == place.read("hf/tokenizer.bin"));
    place.refuses(
        "generate --model small-hf",
        &["small-hf/tokenizer.bin: the tokenizer has 256 tokens, the model only 250"],
    );
}

#[test]
fn an_earlier_result_is_replaced_but_nothing_else() {
    let place = Place::with_run();
    place.does("convert run hf");
    place.does("convert run hf --dtype bf16");
    place.write("hf/notes.txt", "precious");
    place.refuses("convert run hf", &["hf: folder is not replaced because it holds notes.txt"]);
    place.does("convert run w.bin");
    place.does("convert w.bin w.bin --dtype bf16");
    let header: Vec<i32> =
        place.read("w.bin")[..8].chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(header, [20240326, 5]);
}

#[test]
fn a_folder_keeps_the_tokens_that_begin_and_end_a_text_and_the_tokenizer() {
    let place = Place::with_run();
    let tokens = |config: &str| {
        let json: serde_json::Value = serde_json::from_slice(&place.read(config)).unwrap();
        [json["bos_token_id"].clone(), json["eos_token_id"].clone()].map(|id| id.to_string())
    };
    // of a run: its tokenizer's end of text, byte 0
    place.does("convert run hf");
    assert_eq!(tokens("hf/config.json"), ["0", "0"]);
    assert!(place.read("hf/tokenizer.bin") == place.read("run/checkpoints/step-000006/tokenizer.bin"));
    let config = String::from_utf8(place.read("hf/config.json")).unwrap();
    let config = config.replace("bos_token_id\": 0", "bos_token_id\": 1");
    place.write("hf/config.json", config.replace("eos_token_id\": 0", "eos_token_id\": [2, 3]"));
    place.does("convert hf next --dtype bf16");
    assert_eq!(tokens("next/config.json"), ["1", "[2,3]"]);
    assert!(place.read("next/tokenizer.bin") == place.read("run/checkpoints/step-000006/tokenizer.bin"));
    // the folder alone is enough to write text
    place.does("generate --model next --tokens 3");
    // llm.c's file has no such tokens: the last one, as in GPT-2
    place.does("convert run w.bin");
    place.does("convert w.bin bare");
    assert_eq!(tokens("bare/config.json"), ["255", "255"]);
    place.refuses("train --model none.toml --steps 1", &["none.toml: no such file or folder"]);
}
