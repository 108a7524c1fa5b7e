//! Configuration files.

use super::Place;

#[test]
fn mistakes_are_named_with_file_and_key() {
    let place = Place::new();
    for (toml, texts) in [
        ("stepz = 3", ["key `stepz`: ", "similar argument exists: '--steps'"]),
        ("n_layer = 3", ["key `n_layer`: ", "unexpected argument"]),
        ("steps = \"many\"", ["key `steps`: invalid value 'many'", "a whole number"]),
        ("steps = 2.5", ["key `steps`: invalid value '2.5'", "a whole number"]),
        ("val_every = -1", ["key `val_every`: invalid value '-1'", "a whole number"]),
        ("lr = nan", ["key `lr`: invalid value 'NaN'", "a number of at least 0"]),
        ("steps = true", ["key `steps`: ", "a value is required"]),
        ("overwrite = \"yes\"", ["key `overwrite`: ", "unexpected value 'yes'"]),
        ("steps = { a = 1 }", ["key `steps` is a table", "expected a text, a number"]),
        ("data = [[1]]", ["key `data` is a array", "expected a text, a number"]),
        ("steps = 3\nlr = ", ["not TOML, line 2", ""]),
        ("lr = 1.0\nlr = 2.0", ["not TOML, line 2", "duplicate key"]),
        ("config = \"d.toml\"", ["key `config`", "cannot name another"]),
    ] {
        place.write("c.toml", toml);
        place.refuses("train --config c.toml", &["c.toml: ", texts[0], texts[1]]);
    }
    place.write("c.toml", [0xff, 0xfe]);
    place.refuses("train --config c.toml", &["c.toml: cannot read", "UTF-8"]);
}

#[test]
fn every_command_reads_one() {
    let place = Place::with_run();
    place.write("g.toml", "model = \"run\"\ntokens = 12\ngreedy = true\nprompt = \"--x = 1\"\n");
    let text = place.does("generate --config g.toml").stdout;
    assert!(text.starts_with(b"--x = 1"));
    let mut same = place.command("generate --model run --tokens 12 --greedy");
    assert_eq!(same.args(["--prompt", "--x = 1"]).output().unwrap().stdout, text);
    let other = place.does("generate --config g.toml --prompt y").stdout;
    assert!(other.starts_with(b"y"), "flags on the line win");
    place.write(
        "b.toml",
        "model = \"n_layer=1,n_head=1,n_embd=8,vocab_size=16,max_seq_len=8\"\nbatch = 1\nseq = 4\n",
    );
    let text = place.does("plan --threads 1 --config b.toml").text();
    assert!(text.starts_with("n_layer=1,n_head=1,n_embd=8"), "{text}");
}

#[test]
fn a_list_on_the_line_replaces_that_of_the_file() {
    let place = Place::new();
    place.shard("a.bin", &[1; 100]);
    place.write("c.toml", "data = [\"missing-1.bin\", \"missing-2.bin\"]\nseq = 8\nsteps = 1\n");
    let model = "--model n_layer=1,n_head=1,n_embd=8,vocab_size=256,max_seq_len=8";
    place.refuses(&format!("train {model} --config c.toml"), &["missing-1.bin"]);
    place.does(&format!("train {model} --config c.toml --data a.bin --out run"));
}
