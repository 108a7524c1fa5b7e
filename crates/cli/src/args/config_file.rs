//! Configuration files: TOML whose keys are the flags of a command.

use anyhow::{Context, Result, bail};
use ironhorse::train::host::os_string;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A command line, with the flags of its configuration file.
#[derive(Debug, Default)]
pub struct Line {
    /// What the parser gets.
    pub args: Vec<OsString>,
    /// The configuration file, and the keys taken from it.
    config: Option<(PathBuf, Vec<String>)>,
}

impl Line {
    /// The configuration file and its key, if that is where a flag comes from.
    pub fn key_of(&self, flag: &str) -> Option<(&Path, &str)> {
        let (path, keys) = self.config.as_ref()?;
        let key = keys.iter().find(|key| flag_of(key) == flag)?;
        Some((path, key))
    }
}

/// Replaces `--config FILE` by the flags in the file; those that are also on the line are left out.
pub fn expand_config(args: impl Iterator<Item = OsString>) -> Result<Line> {
    let mut kept = Vec::new();
    let mut file = None;
    let mut rest = args;
    while let Some(arg) = rest.next() {
        if arg == "--" {
            kept.push(arg);
            kept.extend(rest);
            break;
        }
        if arg == "--config" {
            file = Some(rest.next().context("--config needs a file")?);
        } else if let Some(path) = arg.as_encoded_bytes().strip_prefix(b"--config=") {
            file = Some(os_string(path).context("--config=FILE is not UTF-8; write --config FILE")?);
        } else {
            kept.push(arg);
        }
    }
    let Some(path) = file.map(PathBuf::from) else { return Ok(Line { args: kept, config: None }) };
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
    let mut flags = flags_of(&text).with_context(|| path.display().to_string())?;
    let given = |flag: &str| {
        let is_given = |arg: &OsString| {
            let rest = arg.as_encoded_bytes().strip_prefix(flag.as_bytes());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"="))
        };
        kept.iter().any(is_given)
    };
    flags.retain(|(key, _)| !given(&flag_of(key)));
    // flags go anywhere behind the command, but not behind `--`
    let end = kept.iter().position(|arg| arg == "--").unwrap_or(kept.len());
    let keys = flags.iter().map(|(key, _)| key.clone()).collect();
    kept.splice(end..end, flags.into_iter().map(|(_, flag)| flag.into()));
    Ok(Line { args: kept, config: Some((path, keys)) })
}

/// The line of a command whose settings were given as a table, such as by another language; errors call it `called`.
pub fn line_of(command: &str, table: toml::Table, called: &str) -> Result<Line> {
    let flags = flags_of_table(table)?;
    let keys = flags.iter().map(|(key, _)| key.clone()).collect();
    let words = ["ironhorse".into(), command.into()].into_iter();
    let args = words.chain(flags.into_iter().map(|(_, flag)| flag.into())).collect();
    Ok(Line { args, config: Some((called.into(), keys)) })
}

/// A JSON object as such a table. A number that TOML does not have is its text.
pub fn table_of_json(json: &str) -> Result<toml::Table> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(json).context("the settings are not a JSON object")?;
    let given = object.into_iter().filter(|(_, value)| !value.is_null());
    given.map(|(key, value)| Ok((key, toml_of(value)?))).collect()
}

fn toml_of(value: serde_json::Value) -> Result<toml::Value> {
    use serde_json::Value;
    Ok(match value {
        Value::Bool(is) => toml::Value::Boolean(is),
        Value::String(text) => toml::Value::String(text),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => toml::Value::Integer(whole),
            (None, Some(real)) if number.is_f64() => toml::Value::Float(real),
            _ => toml::Value::String(number.to_string()),
        },
        Value::Array(items) => toml::Value::Array(items.into_iter().map(toml_of).collect::<Result<_>>()?),
        Value::Null | Value::Object(_) => {
            bail!("a value is {value}, expected a text, a number, true or false, or a list of those")
        }
    })
}

fn flag_of(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// `key = value` becomes `--key=value`, `true` a bare flag, a list a repeated flag; `_` in keys is `-`.
fn flags_of(text: &str) -> Result<Vec<(String, String)>> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(start).filter(|&byte| byte == b'\n').count();
        anyhow::anyhow!("not TOML, line {line}: {}", error.message())
    })?;
    flags_of_table(table)
}

fn flags_of_table(table: toml::Table) -> Result<Vec<(String, String)>> {
    let mut flags = Vec::new();
    for (key, value) in table {
        if key == "config" {
            bail!("key `config`: a configuration file cannot name another");
        }
        let flag = flag_of(&key);
        let mut push = |value: &toml::Value| -> Result<()> {
            let flag = match value {
                toml::Value::String(text) => format!("{flag}={text}"),
                toml::Value::Integer(number) => format!("{flag}={number}"),
                toml::Value::Float(number) => format!("{flag}={number}"),
                toml::Value::Boolean(true) => flag.clone(),
                toml::Value::Boolean(false) => return Ok(()),
                other => bail!(
                    "key `{key}` is a {}, expected a text, a number, true or false, or a list of those",
                    other.type_str()
                ),
            };
            flags.push((key.clone(), flag));
            Ok(())
        };
        match &value {
            toml::Value::Array(items) => items.iter().try_for_each(&mut push)?,
            single => push(single)?,
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::super::check_utf8;
    use super::*;

    #[test]
    fn keys_become_flags() {
        let pairs = flags_of(
            "steps = 3\nlr = 0.5\nval_every = 2\ndata = [\"a\", \"b\"]\noverwrite = true\nx = false",
        );
        let flags: Vec<String> = pairs.unwrap().into_iter().map(|(_, flag)| flag).collect();
        assert_eq!(flags, ["--data=a", "--data=b", "--lr=0.5", "--overwrite", "--steps=3", "--val-every=2"]);
        assert!(flags_of("a = [[1]]").is_err());
        assert!(flags_of("a =").is_err());
    }

    #[test]
    fn settings_of_another_language_become_a_line() {
        let json = r#"{"lr": 3e-4, "steps": 5, "seed": 18446744073709551615, "val_every": null, "data": ["a", "b"], "save_sync": true}"#;
        let line = line_of("train", table_of_json(json).unwrap(), "train").unwrap();
        let flags = [
            "--data=a",
            "--data=b",
            "--lr=0.0003",
            "--save-sync",
            "--seed=18446744073709551615",
            "--steps=5",
        ];
        assert_eq!(line.args, [&["ironhorse", "train"][..], &flags].concat());
        assert_eq!(line.key_of("--lr"), Some((Path::new("train"), "lr")));
        assert!(table_of_json("[1]").is_err() && table_of_json(r#"{"lr": {"a": 1}}"#).is_err());
    }

    #[test]
    fn flags_of_the_line_win() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, "steps = 3\nval_every = 2\ndata = [\"a\"]\n").unwrap();
        let line = [
            "ironhorse",
            "train",
            "--steps=5",
            "--data",
            "b",
            "--config",
            path.to_str().unwrap(),
            "--",
            "--seq",
        ];
        let line = expand_config(line.iter().map(OsString::from)).unwrap();
        assert_eq!(
            line.args,
            ["ironhorse", "train", "--steps=5", "--data", "b", "--val-every=2", "--", "--seq"]
        );
        assert_eq!(line.key_of("--val-every"), Some((path.as_path(), "val_every")));
        assert_eq!(line.key_of("--steps"), None);
        // a flag is not given by one that begins like it
        let line = ["ironhorse", "train", "--steps-more", "--config", path.to_str().unwrap()];
        let line = expand_config(line.iter().map(OsString::from)).unwrap();
        assert!(line.args.contains(&"--steps=3".into()));
        let missing = ["ironhorse", "train", "--config=no-such-file.toml"];
        let error = expand_config(missing.iter().map(OsString::from)).unwrap_err();
        assert!(format!("{error:#}").starts_with("no-such-file.toml: cannot read"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn paths_need_not_be_utf8() {
        use std::os::unix::ffi::{OsStrExt, OsStringExt};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(std::ffi::OsStr::from_bytes(b"c\xff.toml"));
        std::fs::write(&path, "steps = 3\n").unwrap();
        let mut joined = OsString::from("--config=");
        joined.push(&path);
        let out = OsString::from_vec(b"--out=r\xfe".to_vec());
        for config in [vec![joined], vec!["--config".into(), path.clone().into()]] {
            let line = ["ironhorse".into(), "train".into(), out.clone()].into_iter().chain(config);
            let line = expand_config(line).unwrap();
            assert_eq!(
                line.args,
                [OsString::from("ironhorse"), "train".into(), out.clone(), "--steps=3".into()]
            );
            assert_eq!(line.key_of("--steps").unwrap().0, path);
        }
        let text = check_utf8([("--out", Path::new("a")), ("--init", &path)]).unwrap_err().to_string();
        assert!(text.starts_with("--init ") && text.contains("config.toml cannot hold it"), "{text}");
        assert!(check_utf8([("--init", Path::new("a"))]).is_ok());
    }
}
