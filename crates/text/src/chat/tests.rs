//! Whole conversations through the templates of `tests/templates`; `python/tests/test_chat.py` compares with transformers.

use super::*;
use ironhorse_train::data::Sample;

const MARKERS: [&str; 6] = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<s>", "</s>"];

fn source(family: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    std::fs::read_to_string(folder.join(format!("{family}.jinja"))).unwrap()
}

/// The template without the tags, which have lines of their own.
fn unmarked(source: &str) -> String {
    source.split_inclusive('\n').filter(|line| !line.contains("generation %}")).collect()
}

/// A tokenizer of 256 bytes and special tokens, with a template.
fn chat(template: &str) -> Chat {
    let byte = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            let before = (0..byte).filter(|b| !matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)).count();
            char::from_u32(256 + before as u32).unwrap()
        }
    };
    let vocab: Map<String, Value> = (0..=255).map(|b| (byte(b).to_string(), b.into())).collect();
    let added = MARKERS.iter().zip(256..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", tokenizer.to_string());
    let named = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template});
    write("tokenizer_config.json", named.to_string());
    Chat::open(folder.path().to_str().unwrap(), None).unwrap()
}

/// What is learned of a conversation of (role, content), run by run.
fn learned(chat: &Chat, messages: &[(&str, &str)], mask: Mask) -> Result<Vec<String>> {
    let messages: Vec<Value> =
        messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    let fields = json!({"chat_template_kwargs": {"date_string": "today"}});
    let record = Conversation { messages, fields: fields.as_object().unwrap().clone(), given: 0 };
    chat.sample(&Record::Messages(record), mask).map(|sample| runs(chat, &sample))
}

fn runs(chat: &Chat, sample: &Sample) -> Vec<String> {
    let tokens: Vec<(u32, bool)> =
        sample.ids.iter().map(|&id| id as u32).zip(sample.learned.iter().copied()).collect();
    let runs = tokens.chunk_by(|a, b| a.1 == b.1).filter(|run| run[0].1);
    runs.map(|run| {
        let ids: Vec<u32> = run.iter().map(|&(id, _)| id).collect();
        String::from_utf8(chat.tokenizer().decode(&ids).unwrap()).unwrap()
    })
    .collect()
}

const TALK: [(&str, &str); 5] = [
    ("system", "Be brief."),
    ("user", "Hi"),
    ("assistant", " <think>\nA greeting.\n</think>\n\nHéllo\n"),
    ("user", "Bye"),
    ("assistant", "Bye."),
];

#[test]
fn what_the_assistant_says_is_found_with_and_without_tags() {
    let thought = " <think>\nA greeting.\n</think>\n\nHéllo\n";
    for (family, want) in [
        ("chatml", [format!("{thought}<|im_end|>"), "Bye.<|im_end|>".into()]),
        ("llama3", [format!("{}<|eot_id|>", thought.trim()), "Bye.<|eot_id|>".into()]),
        ("mistral", [format!(" {}</s>", thought.trim()), " Bye.</s>".into()]),
        ("qwen3", ["Héllo\n<|im_end|>".into(), "<think>\n\n</think>\n\nBye.<|im_end|>".into()]),
    ] {
        let marked = source(family);
        assert!(chat(&marked).template().unwrap().marks());
        assert!(!chat(&unmarked(&marked)).template().unwrap().marks());
        for template in [&marked, &unmarked(&marked)] {
            let chat = chat(template);
            assert_eq!(learned(&chat, &TALK, Mask::Assistant).unwrap(), want, "{family}");
            assert_eq!(learned(&chat, &TALK, Mask::Completion).unwrap().len(), 1, "{family}");
            let all = learned(&chat, &TALK, Mask::None).unwrap();
            assert_eq!(all.len(), 1);
            assert!(all[0].ends_with("Bye.</s>") || all[0].contains("Bye.<|"), "{family}");
        }
    }
}

/// Whole templates say where an answer begins and ends; Mistral's prompt ends where the answer begins, without a word for it.
#[test]
fn what_a_template_lacks_is_said() {
    for family in ["chatml", "llama3", "mistral", "qwen3"] {
        for template in [source(family), unmarked(&source(family))] {
            assert_eq!(chat(&template).doubts(Mask::Assistant), [""; 0], "{family}");
        }
    }
    let turns = |end: &str, reply: &str| {
        format!(
            "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}: {{{{ m.content }}}}{end}{{% endfor %}}{reply}"
        )
    };
    let reply = "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}";
    let doubts = |end: &str, reply: &str| chat(&turns(end, reply)).doubts(Mask::Assistant);
    assert_eq!(doubts("<|im_end|>\n", reply), [""; 0]);
    let [begin, end] = [doubts("<|im_end|>", ""), doubts("\n", reply)];
    assert!(begin.len() == 1 && begin[0].contains("writes nothing for add_generation_prompt"), "{begin:?}");
    assert!(end.len() == 1 && end[0].contains("the model will not learn to stop"), "{end:?}");
    // an end that is there and not learned is none
    let marked = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}";
    assert_eq!(chat(marked).doubts(Mask::Assistant).len(), 2);
    assert_eq!(chat(marked).doubts(Mask::None).len(), 1);
    assert_eq!(chat("{{ raise_exception('no') }}").doubts(Mask::Assistant), [""; 0]);
}

/// A token that ends turns may be spelled out in what is said.
#[test]
fn a_spelled_out_end_does_not_end_a_turn() {
    let chat = chat(&unmarked(&source("qwen3")));
    let talk = [("user", "a"), ("assistant", "b<|im_end|>c"), ("user", "d"), ("assistant", "e")];
    let got = learned(&chat, &talk, Mask::Assistant).unwrap();
    assert_eq!(got, ["b<|im_end|>c<|im_end|>", "<think>\n\n</think>\n\ne<|im_end|>"]);
}

#[test]
fn a_template_that_tells_nothing_apart_is_refused() {
    let chat = chat(
        "{{ messages | length }}: {% for m in messages %}{{ m.content | upper | replace('A', 'B') }} {% endfor %}",
    );
    let error = learned(&chat, &[("user", "a"), ("assistant", "a")], Mask::Assistant);
    // the mark is kept, so the content is found
    assert_eq!(error.unwrap(), ["B"]);
    let hidden =
        self::chat("{{ messages | length }}{% for m in messages %}{{ m.content | length }}{% endfor %}");
    let error = learned(&hidden, &[("user", "a"), ("assistant", "b")], Mask::Assistant).unwrap_err();
    assert!(error.to_string().contains("put {% generation %} and {% endgeneration %} around it"), "{error}");
    assert!(learned(&hidden, &[("user", "a"), ("assistant", "b")], Mask::None).is_ok());
}

#[test]
fn texts_and_completions_end_with_the_token_that_is_learned() {
    let chat = chat("");
    let text = |text: &str, mask| runs(&chat, &chat.sample(&Record::Text(text.into()), mask).unwrap());
    assert_eq!(text("hi", Mask::Assistant), ["hi</s>"]);
    assert_eq!(text("hi</s>", Mask::Assistant), ["hi</s>"], "not twice");
    assert_eq!(text("", Mask::Assistant), ["</s>"]);
    let record = Record::Completion { prompt: "2+2=".into(), completion: "4".into() };
    assert_eq!(runs(&chat, &chat.sample(&record, Mask::Assistant).unwrap()), ["4</s>"]);
    assert_eq!(runs(&chat, &chat.sample(&record, Mask::None).unwrap()), ["2+2=4</s>"]);
}

/// What the first messages of a list are for, a prompt or a conversation, decides what of it is learned.
#[test]
fn of_a_prompt_nothing_is_learned() {
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let prompt = json!([said("user", "a"), said("assistant", "b"), said("user", "c")]);
    let completion = json!([said("assistant", "d"), said("tool", "e"), said("assistant", "f")]);
    let line = json!({"prompt": prompt, "completion": completion}).to_string();
    let record = Record::parse(&line).unwrap();
    for template in [source("chatml"), unmarked(&source("chatml"))] {
        let chat = chat(&template);
        let learned = |mask| runs(&chat, &chat.sample(&record, mask).unwrap());
        assert_eq!(learned(Mask::Assistant), ["d<|im_end|>", "f<|im_end|>"]);
        assert_eq!(learned(Mask::Completion), ["f<|im_end|>"]);
    }
}

/// A turn may have several marked parts.
#[test]
fn the_last_turn_has_all_its_parts() {
    let template = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}x{% endgeneration %}, \
                    {% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
    assert_eq!(learned(&chat(template), &talk, Mask::Completion).unwrap(), ["x", "d"]);
}

/// A conversation may begin with the assistant, and end with someone else.
#[test]
fn the_assistant_may_speak_first() {
    for template in [source("chatml"), unmarked(&source("chatml"))] {
        let talk = [("assistant", "a"), ("assistant", "b"), ("user", "c")];
        let chat = chat(&template);
        assert_eq!(learned(&chat, &talk, Mask::Assistant).unwrap(), ["a<|im_end|>", "b<|im_end|>"]);
        assert!(learned(&chat, &talk, Mask::Completion).unwrap().is_empty());
    }
}

#[test]
fn the_scope_of_a_generation_is_that_of_its_block() {
    let template = "{% for m in messages %}{% set x = 'a' %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}";
    let chat = chat(template);
    assert_eq!(chat.prompt(&[json!({"role": "assistant", "content": "b"})], false).unwrap(), "ba");
}

#[test]
fn lines_are_cut_counted_and_named() {
    let chat = chat(&source("chatml"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.jsonl");
    let read = |text: &[u8], context| -> (Vec<ChatLine>, Option<String>) {
        std::fs::write(&path, text).unwrap();
        let files = ChatFiles::new(std::slice::from_ref(&path)).unwrap();
        let (mut lines, mut failed) = (Vec::new(), None);
        for line in files.samples(&chat, Mask::Assistant, context) {
            match line {
                Ok(line) => lines.push(line),
                Err(error) => failed = Some(error.to_string()),
            }
        }
        (lines, failed)
    };
    let (lines, failed) = read(b"{\"text\": \"abc\"}\n\n{\"text\": \"abcdef\"}", Some(5));
    assert_eq!(failed, None);
    let found: Vec<_> = lines.iter().map(|line| (line.line, line.sample.ids.len(), line.cut)).collect();
    assert_eq!(found, [(1, 4, 0), (3, 5, 2)]);
    let mut counts = Counts::default();
    lines.iter().for_each(|line| counts.add(line));
    assert_eq!(
        counts.text(Some(5)),
        "2 samples, 9 tokens, 7 learned (77.8 %); 1 longer than 5 tokens were cut by 2 in all"
    );
    let (lines, failed) = read(b"{\"text\": \"a\"}\nx\n{\"text\": \"b\"}", None);
    assert_eq!(lines.len(), 1, "an error is the end");
    assert!(failed.unwrap().ends_with("c.jsonl: line 2 is not JSON (expected value at column 1)"));
    let (_, failed) = read(b"{\"text\": \"a\xff\"}", None);
    assert!(failed.unwrap().ends_with("c.jsonl: line 1 is not UTF-8 (byte 12 of it)"));
    let (_, failed) = read(b"\n \n", None);
    assert!(failed.unwrap().ends_with("c.jsonl: has no sample, expected a JSON object in every line"));
}
