//! Every reader on damaged files: each byte of a valid one replaced in turn, and the file cut at every length. It may be
//! refused, but nothing may panic, and what is accepted must keep what `exercise` checks.
#![allow(clippy::unwrap_used, clippy::panic)]

use ironhorse_text::exercise;

#[track_caller]
fn damage(bytes: &[u8], step: usize, run: impl Fn(&[u8]) -> bool) -> usize {
    assert!(run(bytes), "the undamaged file is refused");
    damaged_only(bytes, step, run)
}

/// How many damaged files are refused.
fn damaged_only(bytes: &[u8], step: usize, run: impl Fn(&[u8]) -> bool) -> usize {
    let mut refused = 0;
    for at in (0..bytes.len()).step_by(step) {
        for value in [0, 1, b'"', b'9', 0x7f, 0x80, 0xff] {
            let mut damaged = bytes.to_vec();
            damaged[at] = value;
            refused += usize::from(!run(&damaged));
        }
        refused += usize::from(!run(&bytes[..at]));
    }
    refused
}

#[test]
fn lines() {
    let line = r#"{"id": [1, {"a": null}], "text": "a\n\u00e9 b", "z": true}"#;
    assert!(damage(line.as_bytes(), 1, exercise::json_line) > 50);
}

#[test]
fn text() {
    damage("it's  A\n\n\tb 1234 \u{301}é中😀 <|endoftext|> don't".as_bytes(), 1, exercise::text);
}

#[test]
fn tokenizers() {
    let settings = ironhorse_text::tokenizer::train::TrainSettings { vocab_size: 270, ..Default::default() };
    let documents = (0..50).map(|n| format!("one two three {n}"));
    let made = ironhorse_text::tokenizer::train::train(&settings, documents).unwrap();
    assert!(damage(made.json.as_bytes(), 23, exercise::tokenizer_json) > 50);
}

/// Every number in a JSON text replaced by others, one at a time.
fn other_numbers(json: &str, run: impl Fn(&[u8]) -> bool) -> usize {
    let (mut at, mut refused) = (0, 0);
    while let Some(start) = json[at..].find(|c: char| c.is_ascii_digit()).map(|found| at + found) {
        let end = json[start..].find(|c: char| !c.is_ascii_digit()).map_or(json.len(), |found| start + found);
        for number in ["0", "1", "2147483648", "9223372036854775807", "18446744073709551615"] {
            refused += usize::from(!run([&json[..start], number, &json[end..]].concat().as_bytes()));
        }
        at = end;
    }
    refused
}

#[test]
fn other_tokenizers() {
    let pieces = ["a", "b", "c", " ", "t", "h", "e", "the", " the"].map(|token| token.as_bytes().to_vec());
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.extend([b"th".to_vec(), b"the".to_vec(), b" the".to_vec(), b"<|endoftext|>".to_vec()]);
    for (tokens, eot, fewest) in [(pieces.to_vec(), 0, 3), (tokens, 259, 50)] {
        let bin = ironhorse_train::format::tokenizer::Tokenizer { tokens, eot };
        let mut bytes = Vec::new();
        bin.write_to(&mut ironhorse_train::format::Sink::new(&mut bytes, "t.bin".as_ref())).unwrap();
        let (head, body) = (bytes[..1024].to_vec(), bytes[1024..].to_vec());
        assert!(damage(&head, 4, |head| exercise::tokenizer_bin(&[head, &body].concat())) > 5);
        assert!(damage(&body, 7, |body| exercise::tokenizer_bin(&[&head, body].concat())) > fewest);
    }
    // of a rank file the bytes come first
    let line = |(rank, token): (usize, &[u8])| format!("{} {rank}\n", base64(token));
    let bytes: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    let pairs: [&[u8]; 3] = [b"th", b"the", b" the"];
    let ranks: String = bytes.iter().map(|byte| byte.as_slice()).chain(pairs).enumerate().map(line).collect();
    // the number of ranks tells the split pattern, and this is none that is known
    assert!(damaged_only(ranks.as_bytes(), 17, exercise::ranks) > 50);

    let vocab: Vec<String> = (0..=255_u32)
        .map(|byte| match byte {
            33..=126 | 161..=172 | 174..=255 => byte,
            0..=32 => 256 + byte,
            127..=160 => 256 + 33 + byte - 127,
            _ => 256 + 67,
        })
        .map(|code| char::from_u32(code).unwrap().to_string())
        .chain(["th".into(), "the".into()])
        .enumerate()
        .map(|(id, token)| format!("{}:{id}", serde_json::to_string(&token).unwrap()))
        .collect();
    let files = format!(
        "{{{}}}\0#version: 0.2\nt h\nth e\n\0{{\"tokenizer_class\": \"Qwen2Tokenizer\", \"added_tokens_decoder\": \
         {{\"258\": {{\"content\": \"<|endoftext|>\", \"special\": true}}}}}}",
        vocab.join(",")
    );
    assert!(damage(files.as_bytes(), 13, exercise::vocab_json) > 50);

    // not byte-level: the crate `tokenizers` reads and runs it
    let word_piece = concat!(
        r#"{"version":"1.0","added_tokens":[{"id":0,"content":"[UNK]","single_word":false,"lstrip":false,"rstrip":false,"#,
        r#""normalized":false,"special":true}],"normalizer":{"type":"Lowercase"},"pre_tokenizer":{"type":"Whitespace"},"#,
        r#""post_processor":null,"decoder":null,"model":{"type":"WordPiece","unk_token":"[UNK]","#,
        r###""continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"[UNK]":0,"a":1,"##a":2,"it":3}}}"###,
    );
    assert!(damage(word_piece.as_bytes(), 1, exercise::any_tokenizer_json) > 50);
    other_numbers(word_piece, exercise::any_tokenizer_json);
    let unigram = concat!(
        r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"Metaspace","replacement":"_","#,
        r#""prepend_scheme":"always","split":true},"post_processor":null,"decoder":null,"#,
        r#""model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["a",-1.5],["_it",-2.25]],"byte_fallback":false}}"#,
    );
    assert!(damage(unigram.as_bytes(), 1, exercise::any_tokenizer_json) > 50);
    other_numbers(unigram, exercise::any_tokenizer_json);
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = bytes.chunks(3).map(|group| {
        let bits =
            group.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        let digit = |at: usize| match at <= group.len() {
            true => char::from(DIGITS[(bits >> (18 - 6 * at) & 63) as usize]),
            false => '=',
        };
        (0..4).map(digit).collect::<String>()
    });
    groups.collect()
}

#[test]
fn documents() {
    let text = "One -- two\n--\nthree words, é中😀 and more of them in a long line\n\nlast--";
    let lines = "{\"text\": \"a\"}\n\n{\"text\": \"\u{e9}\"}\r\nnot JSON\n{\"text\": 3}";
    let gzip = |bytes: &[u8]| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut packed, bytes).unwrap();
        packed.finish().unwrap()
    };
    for how in [0, 8, 16, 32, 40] {
        let file = |content: &[u8]| [&[how], content].concat();
        damage(&file(text.as_bytes())[1..], 1, |bytes| exercise::documents(&file(bytes)));
    }
    for (how, packed) in [
        (1, lines.as_bytes().to_vec()),
        (2, gzip(text.as_bytes())),
        (3, gzip(lines.as_bytes())),
        (4, zstd::encode_all(text.as_bytes(), 3).unwrap()),
        (13, zstd::encode_all(lines.as_bytes(), 3).unwrap()),
    ] {
        let refused = damage(&packed, 1, |bytes| exercise::documents(&[&[how], bytes].concat()));
        assert!(how == 1 || refused > 50, "{how}: {refused}");
    }
}

#[test]
fn manifests_and_journals() {
    let folder = tempfile::tempdir().unwrap();
    let interrupted = exercise::Interrupted::new(folder.path()).unwrap();
    let journal = String::from_utf8(interrupted.journal().to_vec()).unwrap();
    assert!(damage(journal.as_bytes(), 29, |journal| interrupted.go_on(journal)) > 50);
    assert!(other_numbers(&journal, |journal| interrupted.go_on(journal)) > 20);
    assert!(interrupted.go_on(journal.as_bytes()));
    let manifest = std::fs::read_to_string(folder.path().join("out/manifest.json")).unwrap();
    assert!(damage(manifest.as_bytes(), 1, exercise::manifest) > 50);
    for (found, other) in
        [("\"s_train_000000.bin", "\"../s_train.bin"), ("\"s_val", "\"/s_val"), ("-shards", "-other")]
    {
        assert!(
            manifest.contains(found) && !exercise::manifest(manifest.replace(found, other).as_bytes()),
            "{found}"
        );
    }
}

#[test]
fn parquet() {
    use parquet::data_type::ByteArrayType;
    use parquet::file::writer::SerializedFileWriter;
    let schema =
        parquet::schema::parser::parse_message_type("message m { optional binary text (UTF8); }").unwrap();
    let mut file = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut file, schema.into(), Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values = ["one", "two", "one"].map(Into::into);
    column.typed::<ByteArrayType>().write_batch(&values, Some(&[1, 0, 1, 1]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    assert!(damage(&file, 1, exercise::parquet) > 50);
}
