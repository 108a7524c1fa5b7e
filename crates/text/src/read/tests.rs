use std::io::Write;
use std::path::{Path, PathBuf};

use super::text::CutAt;
use super::*;
use crate::Error;
use crate::tokenizer::Tokenizer;

fn small() -> ReadSettings {
    ReadSettings { unit_bytes: 64, large_bytes: 200, ..ReadSettings::default() }
}

fn units(path: &Path, settings: &ReadSettings, cut: CutAt<'_>) -> Result<Vec<Unit>, Error> {
    let inputs = resolve(&[path.to_owned()], None)?;
    Units::new(&inputs, settings, cut, 0).collect()
}

fn whole(text: &[u8]) -> Option<usize> {
    Some(text.len())
}

fn file(folder: &tempfile::TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn pack(name: &str, bytes: &[u8]) -> Vec<u8> {
    if name.ends_with(".gz") {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        return packed.finish().unwrap();
    }
    if name.ends_with(".zst") { zstd::encode_all(bytes, 1).unwrap() } else { bytes.to_vec() }
}

/// The documents of units as bytes, parts joined.
fn joined(units: &[Unit]) -> Vec<Vec<u8>> {
    let mut documents: Vec<Vec<u8>> = Vec::new();
    for unit in units {
        match &unit.content {
            Content::Documents(found) => {
                documents.extend(found.iter().map(|document| document.bytes.clone()))
            }
            Content::Part(part) if part.first => documents.push(part.bytes.clone()),
            Content::Part(part) => documents.last_mut().unwrap().extend(&part.bytes),
            Content::Lines { first, bytes } => {
                documents.extend(lines::numbered(*first, bytes).filter_map(|(_, line)| {
                    match lines::parse(line, "text") {
                        lines::Line::Text(text, _) => Some(text.into_owned().into_bytes()),
                        _ => None,
                    }
                }))
            }
            Content::NotText => {}
        }
    }
    documents
}

#[test]
fn text_plain_and_packed_small_and_large() {
    let folder = tempfile::tempdir().unwrap();
    let text = "one two three\n".repeat(100);
    for name in ["a.txt", "a.md", "a.txt.gz", "a.txt.zst"] {
        for len in [0, 1, 63, 64, 65, 199, 200, 201, 1400] {
            let path = file(&folder, name, &pack(name, &text.as_bytes()[..len]));
            let found = units(&path, &small(), &whole).unwrap();
            let want: Vec<_> = (len > 0).then(|| text.as_bytes()[..len].to_vec()).into_iter().collect();
            assert_eq!(joined(&found), want, "{name} {len}");
            let end = found.last().unwrap().end.clone().unwrap();
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(end.bytes, bytes.len() as u64);
            assert_eq!(end.sha256, format!("{:x}", Sha256::digest(&bytes)));
            for unit in &found {
                if let Content::Part(part) = &unit.content {
                    assert_eq!(part.hash, DocumentHash::of(&text.as_bytes()[..len]));
                    assert!(part.bytes.len() <= 64 && !part.forced);
                }
            }
        }
    }
}

#[test]
fn a_large_document_is_cut_where_ids_do_not_change() {
    let folder = tempfile::tempdir().unwrap();
    let line = "It's  a dog's life\n\n — isn't it? 12345 été\u{301} 中文中文 😀😀 'll \t x!!\n// ";
    let text = line.repeat(40);
    let path = file(&folder, "a.txt", text.as_bytes());
    for name in ["bytes", "gpt2", "cl100k_base", "o200k_base"] {
        let tokenizer = Tokenizer::open(name).unwrap();
        let found = units(&path, &small(), &|text| tokenizer.safe_cut(text)).unwrap();
        let mut ids = Vec::new();
        for unit in &found {
            if let Content::Part(part) = &unit.content {
                assert!(!part.forced);
                ids.extend(tokenizer.encode(&part.bytes).unwrap());
            }
        }
        assert!(found.len() > 20, "{name}: {}", found.len());
        assert!(ids == tokenizer.encode(text.as_bytes()).unwrap(), "{name}");
    }
}

#[test]
fn the_end_of_a_text_can_be_for_validation() {
    let folder = tempfile::tempdir().unwrap();
    for lines in [10, 100] {
        let text = "one two three\n".repeat(lines);
        let path = file(&folder, "a.txt", text.as_bytes());
        let settings = ReadSettings { val_tail: Some(0.1), ..small() };
        let found = units(&path, &settings, &whole).unwrap();
        let documents = joined(&found);
        assert_eq!(documents.concat(), text.as_bytes());
        assert_eq!(
            documents.iter().map(Vec::len).collect::<Vec<_>>(),
            [lines * 14 * 9 / 10, lines * 14 / 10]
        );
        let purposes = found.iter().flat_map(|unit| match &unit.content {
            Content::Documents(documents) => documents.iter().filter_map(|d| d.purpose).collect(),
            Content::Part(part) if part.first => part.purpose.into_iter().collect(),
            _ => Vec::new(),
        });
        assert_eq!(purposes.collect::<Vec<_>>(), [Use::Train, Use::Val]);
    }
}

#[test]
fn documents_between_delimiters() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(500);
    let parts = ["a", "", "b c", &long, "last"];
    let path = file(&folder, "a.txt", parts.join("\n<|end|>\n").as_bytes());
    let settings = ReadSettings { delimiter: Some("<|end|>".into()), ..small() };
    let documents = joined(&units(&path, &settings, &whole).unwrap());
    assert_eq!(documents, parts.map(|part| part.as_bytes().to_vec()));
}

#[test]
fn lines_are_whole_and_numbered() {
    let folder = tempfile::tempdir().unwrap();
    let line = |n: usize| format!("{{\"text\": \"{}\"}}", "y".repeat(n));
    let text: String = [3, 500, 1, 80, 70, 2].map(|n| line(n) + "\n").concat() + &line(7);
    for name in ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"] {
        let path = file(&folder, name, &pack(name, text.as_bytes()));
        let found = units(&path, &small(), &whole).unwrap();
        assert!(found.len() > 3);
        assert_eq!(joined(&found).iter().map(Vec::len).collect::<Vec<_>>(), [3, 500, 1, 80, 70, 2, 7]);
        let mut next = 1;
        for unit in &found {
            if let Content::Lines { first, bytes } = &unit.content {
                assert_eq!(*first, next);
                next += lines::numbered(*first, bytes).count() as u64;
            }
        }
        assert_eq!(next, 8);
    }
}

#[test]
fn what_is_not_text_is_named_or_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder, "a.txt", b"\x7fELF\0\0\0");
    let error = units(&path, &small(), &whole).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "a.txt: holds zero bytes, expected text; --skip-bad leaves such files out and counts them"
        ),
        "{error}"
    );
    let settings = ReadSettings { skip_bad: true, ..small() };
    let found = units(&path, &settings, &whole).unwrap();
    assert_eq!(found[0].content, Content::NotText);
    assert_eq!(found[1].end.as_ref().unwrap().bytes, 7);
    let cut = pack("a.gz", &b"text".repeat(1000));
    let path = file(&folder, "cut.txt.gz", &cut[..cut.len() / 2]);
    assert!(units(&path, &small(), &whole).unwrap_err().to_string().contains("cut.txt.gz: cannot read"));
    let path = file(&folder, "odd.txt.zst", b"not zstd at all");
    assert!(units(&path, &small(), &whole).unwrap_err().to_string().contains("odd.txt.zst: cannot read"));
    let path = file(&folder, "odd.parquet", b"PAR1 not parquet PAR1");
    let error = units(&path, &small(), &whole).unwrap_err().to_string();
    assert!(error.contains("odd.parquet: is not a valid parquet file"), "{error}");
}

/// A parquet file with a column of text, some of it null, and one of numbers.
fn parquet_file(path: &Path, rows: &[Option<&str>]) {
    use parquet::data_type::{ByteArrayType, Int64Type};
    use parquet::file::writer::SerializedFileWriter;
    let schema = "message m { optional binary text (UTF8); required int64 id; }";
    let schema = std::sync::Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Default::default()).unwrap();
    for rows in rows.chunks(300) {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<_> = rows.iter().flatten().map(|&text| text.into()).collect();
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn rows_of_parquet() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let texts: Vec<String> = (0..1000).map(|n| format!("row {n} été")).collect();
    let rows: Vec<Option<&str>> =
        texts.iter().enumerate().map(|(n, text)| (n % 10 != 3).then_some(text.as_str())).collect();
    parquet_file(&path, &rows);
    let found = units(&path, &small(), &whole).unwrap();
    let want: Vec<_> = rows.iter().flatten().map(|text| text.as_bytes().to_vec()).collect();
    assert_eq!(joined(&found), want);
    assert_eq!(found.iter().map(|unit| unit.missing).sum::<u64>(), 100);
    let field = |field: &str| {
        units(&path, &ReadSettings { field: field.into(), ..small() }, &whole).unwrap_err().to_string()
    };
    assert!(field("id").contains("column `id` holds INT64, expected text (BYTE_ARRAY)"), "{}", field("id"));
    assert!(
        field("body").contains("has no column `body`, only text, id; --field names another"),
        "{}",
        field("body")
    );
}

#[test]
fn fractions_of_hashes_are_even() {
    let below = (0..10_000u32).filter(|n| DocumentHash::of(&n.to_le_bytes()).fraction() < 0.25).count();
    assert!((2300..2700).contains(&below), "{below}");
    assert!(DocumentHash(u128::MAX).fraction() < 1.0);
}
