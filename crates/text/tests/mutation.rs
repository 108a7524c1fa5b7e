//! Every reader on damaged files: each byte of a valid one replaced in turn, and the file cut at every length. It may be
//! refused, but nothing may panic, and what is accepted must keep what `exercise` checks.
#![allow(clippy::unwrap_used, clippy::panic)]

use ironhorse_text::exercise;

fn damage(bytes: &[u8], step: usize, run: impl Fn(&[u8]) -> bool) -> usize {
    assert!(run(bytes), "the undamaged file is refused");
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
