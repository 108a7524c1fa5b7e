//! What Python gives to templates: `json.dumps` and `strftime`.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// How JSON is written.
struct Style<'a> {
    indent: Option<usize>,
    ascii: bool,
    sorted: bool,
    /// The separators between items, and between key and value.
    between: [&'a str; 2],
}

/// The filter `tojson`, as transformers has it: `json.dumps` without the escapes of HTML.
pub fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get::<Option<usize>>("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let between = match separators.as_deref() {
        Some([items, keys]) => [items.as_str(), keys.as_str()],
        Some(_) => return Err(refusal("tojson: `separators` is expected to be two strings")),
        None if indent.is_some() => [",", ": "],
        None => [", ", ": "],
    };
    let mut text = String::new();
    write_json(&mut text, value, &Style { indent, ascii, sorted, between }, 0)?;
    Ok(text)
}

fn refusal(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

fn write_json(out: &mut String, value: &Value, style: &Style<'_>, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_list(out, ['[', ']'], items.len(), style, depth, |out, at| {
                write_json(out, &items[at], style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sorted {
                keys.sort_by_key(Value::to_string);
            }
            write_list(out, ['{', '}'], keys.len(), style, depth, |out, at| {
                write_string(out, &keys[at].to_string(), style.ascii);
                out.push_str(style.between[1]);
                write_json(out, &value.get_item(&keys[at])?, style, depth + 1)
            })?;
        }
        kind => return Err(refusal(format!("tojson: a value is {kind}, expected what JSON can hold"))),
    }
    Ok(())
}

fn write_list(
    out: &mut String,
    [open, close]: [char; 2],
    count: usize,
    style: &Style<'_>,
    depth: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for at in 0..count {
        if at > 0 {
            out.push_str(style.between[0]);
        }
        new_line(out, depth + 1);
        item(out, at)?;
    }
    if count > 0 {
        new_line(out, depth);
    }
    out.push(close);
    Ok(())
}

/// A number as Python writes it: with an exponent from 1e16 on and below 1e-4.
fn write_number(out: &mut String, value: &Value) {
    let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
    let scientific = float.filter(|x| *x != 0.0 && !(1e-4..1e16).contains(&x.abs()));
    let text = match (scientific.map(|x| format!("{x:e}")), float) {
        (Some(text), _) => match text.split_once('e') {
            Some((digits, power)) if power.starts_with('-') => format!("{digits}e-{:0>2}", &power[1..]),
            Some((digits, power)) => format!("{digits}e+{power:0>2}"),
            None => text,
        },
        (None, Some(x)) => format!("{x:?}"),
        (None, None) => value.to_string(),
    };
    out.push_str(&text);
}

fn write_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && !c.is_ascii()) || (ascii && c == '\u{7f}') => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units)
                    .iter()
                    .for_each(|unit| write!(out, "\\u{unit:04x}").unwrap_or_default());
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// The time of the clock as `datetime.now().strftime` writes it, in UTC.
pub fn strftime_now(format: &str) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, seconds)
}

/// Seconds since 1970 as text.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, clock) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (name, week_day) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let piece = match chars.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => name.to_owned(),
            Some('b') => name[..3].to_owned(),
            Some('A') => week_day.to_owned(),
            Some('a') => week_day[..3].to_owned(),
            Some('H') => format!("{:02}", clock / 3600),
            Some('M') => format!("{:02}", clock / 60 % 60),
            Some('S') => format!("{:02}", clock % 60),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{:02}:{:02}:{:02}", clock / 3600, clock / 60 % 60, clock % 60),
            Some('-') => match chars.next() {
                Some('d') => day.to_string(),
                Some('m') => month.to_string(),
                other => return Err(unknown(&format!("-{}", other.map_or(String::new(), String::from)))),
            },
            Some('%') => "%".to_owned(),
            other => return Err(unknown(&other.map_or(String::new(), String::from))),
        };
        text.push_str(&piece);
    }
    Ok(text)
}

fn unknown(directive: &str) -> Error {
    refusal(format!(
        "strftime_now: `%{directive}` is not known, expected one of Y y m d B b A a H M S F T -d -m %"
    ))
}

/// Year, month and day of a number of days since 1970. Years are counted from March: the leap day is their last.
fn civil(days: u64) -> (u64, usize, u64) {
    let days = days + 719_468; // since 1 March of the year 0
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year + u64::from(month <= 2), month as usize, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |seconds| strftime("%A %d %b %Y, %F %T %-d.%-m.%y %%", seconds).unwrap();
        assert_eq!(date(0), "Thursday 01 Jan 1970, 1970-01-01 00:00:00 1.1.70 %");
        assert_eq!(date(951_827_696), "Tuesday 29 Feb 2000, 2000-02-29 12:34:56 29.2.00 %");
        assert_eq!(date(4_107_542_400), "Monday 01 Mar 2100, 2100-03-01 00:00:00 1.3.00 %");
        assert_eq!(
            strftime("%Q", 0).unwrap_err().detail().map(|text| text.contains("`%Q` is not known")),
            Some(true)
        );
    }

    #[test]
    fn json_is_that_of_python() {
        let value: serde_json::Value = serde_json::from_str(
            r#"{"b": [1, 2.5, true, null], "a": {"é<\"": "\n\u0001"}, "c": [], "d": {}}"#,
        )
        .unwrap();
        let value = Value::from(minijinja::value::Serde(&value));
        let json = |options: &[(&str, Value)]| to_json(&value, options.iter().cloned().collect()).unwrap();
        assert_eq!(json(&[]), r#"{"b": [1, 2.5, true, null], "a": {"é<\"": "\n\u0001"}, "c": [], "d": {}}"#);
        assert_eq!(
            json(&[("indent", 2.into()), ("sort_keys", true.into()), ("ensure_ascii", true.into())]),
            "{\n  \"a\": {\n    \"\\u00e9<\\\"\": \"\\n\\u0001\"\n  },\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"c\": [],\n  \"d\": {}\n}"
        );
        for (number, want) in [
            ("1e-05", "1e-05"),
            ("0.0001", "0.0001"),
            ("-2.5E20", "-2.5e+20"),
            ("1e16", "1e+16"),
            ("1234567890123456.0", "1234567890123456.0"),
            ("0.0", "0.0"),
            ("18446744073709551615", "18446744073709551615"),
            ("-7", "-7"),
        ] {
            let number: serde_json::Value = serde_json::from_str(number).unwrap();
            let number = Value::from(minijinja::value::Serde(&number));
            assert_eq!(to_json(&number, Kwargs::from_iter::<[(&str, Value); 0]>([])).unwrap(), want);
        }
        let tight = Value::from(vec![",", ":"]);
        assert_eq!(
            json(&[("separators", tight)]),
            r#"{"b":[1,2.5,true,null],"a":{"é<\"":"\n\u0001"},"c":[],"d":{}}"#
        );
    }
}
