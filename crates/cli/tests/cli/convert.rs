//! `ironhorse convert`

use super::Place;

#[test]
fn there_and_back_are_the_same_bytes() {
    let place = Place::with_run();
    place.does("convert run/checkpoint a.bin");
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
    place.refuses("convert run/checkpoint y.safetensors", &["y.safetensors", "name a folder"]);
    let model = "hidden=16,layers=1,heads=2,experts=3,top_k=1,ffn=8,vocab=256,context=16";
    place.does(&format!("train --model {model} --batch 2 --seq 16 --steps 1 --sample-tokens 0 --out moe"));
    let refused = place.runs("convert moe/checkpoint moe.bin");
    assert_eq!(
        refused.stderr,
        "error: llm.c's .bin holds a GPT-2 only, not a model of kind moe; name a Hugging Face folder, without .bin\n"
    );
    place.does("convert moe/checkpoint moe-folder");
}

#[test]
fn an_earlier_result_is_replaced_but_nothing_else() {
    let place = Place::with_run();
    place.does("convert run/checkpoint hf");
    place.does("convert run/checkpoint hf --dtype bf16");
    place.write("hf/notes.txt", "precious");
    place.refuses("convert run/checkpoint hf", &["hf: folder is not replaced because it holds notes.txt"]);
    place.does("convert run/checkpoint w.bin");
    place.does("convert w.bin w.bin --dtype bf16");
    let header: Vec<i32> =
        place.read("w.bin")[..8].chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(header, [20240326, 5]);
}
