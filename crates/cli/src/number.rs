//! What numbers a flag accepts. The error says what would have been right.

use anyhow::Context;
use ironhorse::core::DropRate;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// The most threads that can be asked for.
const MOST_THREADS: u64 = 1024;

/// A whole number in this range, as an unsigned type.
pub fn whole<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        parse(text, &range)
            .ok_or_else(|| format!("expected a whole number from {} to {}", range.start(), range.end()))
    }
}

fn parse<T: TryFrom<u64>>(text: &str, range: &RangeInclusive<u64>) -> Option<T> {
    let number = text.parse().ok().filter(|number| range.contains(number))?;
    T::try_from(number).ok()
}

/// A count: at least 1.
pub fn count<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    at_least(1, text)
}

/// A whole number where 0 means something.
pub fn count_or_0<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    at_least(0, text)
}

/// A whole number that a run folder can keep: in TOML they have a sign, so 2⁶³ and more do not fit.
fn at_least<T: TryFrom<u64>>(least: u64, text: &str) -> Result<T, String> {
    let most = (0..u64::BITS).rev().map(|bits| u64::MAX >> bits).rfind(|&most| T::try_from(most).is_ok());
    let most = most.unwrap_or(0).min(i64::MAX as u64);
    parse(text, &(least..=most))
        .ok_or_else(|| format!("expected a whole number of at least {least}, at most {most}"))
}

/// A seed. Run folders keep it as TOML, whose whole numbers have a sign.
pub fn seed(text: &str) -> Result<u64, String> {
    whole(0..=i64::MAX as u64)(text)
}

/// Threads; 0 means one for each core.
pub fn threads(text: &str) -> Result<usize, String> {
    whole(0..=MOST_THREADS)(text)
}

/// A length of time: whole numbers with `d`, `h`, `m` or `s`, the largest first, such as `3h55m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "expected a time such as 3h55m, 90m or 45s".to_owned();
    let (mut rest, mut total, mut below) = (text, 0_u64, u64::MAX);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let value: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let mut chars = rest[digits..].chars();
        let unit = match chars.next() {
            Some('d') => 86_400,
            Some('h') => 3600,
            Some('m') => 60,
            Some('s') => 1,
            _ => return Err(wrong()),
        };
        if unit >= below {
            return Err(wrong());
        }
        below = unit;
        total = value.checked_mul(unit).and_then(|part| total.checked_add(part)).ok_or_else(wrong)?;
        rest = chars.as_str();
    }
    // no run lasts longer than a century, and sums with the present must not overflow
    if total == 0 || total > 100 * 366 * 86_400 { Err(wrong()) } else { Ok(Duration::from_secs(total)) }
}

/// A finite number of at least 0.
pub fn at_least_0<T: FromStr + Copy + Into<f64>>(text: &str) -> Result<T, String> {
    number(text, |x| x >= 0.0, "a number of at least 0")
}

/// A finite number above 0.
pub fn above_0<T: FromStr + Copy + Into<f64>>(text: &str) -> Result<T, String> {
    number(text, |x| x > 0.0, "a number above 0")
}

/// A number from 0 to 1.
pub fn fraction<T: FromStr + Copy + Into<f64>>(text: &str) -> Result<T, String> {
    number(text, |x| (0.0..=1.0).contains(&x), "a number from 0 to 1")
}

/// More than 0, at most 1.
pub fn probability<T: FromStr + Copy + Into<f64>>(text: &str) -> Result<T, String> {
    number(text, |x| x > 0.0 && x <= 1.0, "a number above 0, at most 1")
}

/// A number of at least 0 and less than 1.
pub fn below_1<T: FromStr + Copy + Into<f64>>(text: &str) -> Result<T, String> {
    number(text, |x| (0.0..1.0).contains(&x), "a number of at least 0 and below 1")
}

/// The rate of `--dropout`.
pub fn drop_rate(rate: f64) -> anyhow::Result<DropRate> {
    DropRate::new(rate)
        .with_context(|| format!("--dropout is {rate}, expected a number of at least 0 and below 1"))
}

/// A time as [`duration`] reads it.
pub fn as_seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{}s", time.as_secs()))
}

/// A size as [`bytes`] reads it.
pub fn as_bytes<S: serde::Serializer>(bytes: &u64, to: S) -> Result<S::Ok, S::Error> {
    match bytes.is_multiple_of(1 << 20) {
        true => to.collect_str(&format_args!("{}MiB", bytes >> 20)),
        false => to.collect_str(&format_args!("{bytes}B")),
    }
}

/// Units of bytes, in lower case. The single `b` comes last: the others end with it.
const UNITS: [(&str, f64); 9] = [
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
];

/// A size of memory: a number with B, KiB, MiB, GiB, TiB, or KB, MB, GB, TB.
pub fn bytes(text: &str) -> Result<u64, String> {
    in_bytes(text, None).ok_or_else(|| "expected bytes such as 139GiB or 80GB".into())
}

/// The size of a file: the same, or a number of bytes without a unit.
pub fn file_size(text: &str) -> Result<u64, String> {
    let expected = || "expected a number of bytes above 0, such as 500MB or 5GB".into();
    in_bytes(text, Some(1.0)).ok_or_else(expected)
}

/// `no_unit` is what a number without a unit counts in.
fn in_bytes(text: &str, no_unit: Option<f64>) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, *factor)));
    let (number, factor) = unit.or(no_unit.map(|factor| (lower.as_str(), factor)))?;
    let bytes = number.trim().parse::<f64>().ok()? * factor;
    // below 2^53 every whole number of bytes is exact
    (1.0..9e15).contains(&bytes).then_some(bytes as u64)
}

fn number<T: FromStr + Copy + Into<f64>>(
    text: &str,
    accepts: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<T, String> {
    let number = text.parse::<T>().ok().filter(|&number| {
        let number = number.into();
        number.is_finite() && accepts(number)
    });
    number.ok_or_else(|| format!("expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges() {
        assert_eq!(count::<usize>("1"), Ok(1));
        let refusal = |most: &str| format!("expected a whole number of at least 1, at most {most}");
        assert_eq!(
            (count("4294967295"), count::<u32>("4294967296")),
            (Ok(u32::MAX), Err(refusal("4294967295")))
        );
        // what a run's config.toml can hold
        assert_eq!(count("9223372036854775807"), Ok(i64::MAX as u64));
        assert_eq!(count::<u64>("9223372036854775808"), Err(refusal("9223372036854775807")));
        assert_eq!(count_or_0("0"), Ok(0_u64));
        assert!(count_or_0::<u64>("18446744073709551615").is_err());
        for bad in ["0", "-1", "1.5", "", "many", "99999999999999999999"] {
            assert!(count::<u64>(bad).is_err(), "{bad}");
        }
        assert_eq!(threads("1025"), Err("expected a whole number from 0 to 1024".into()));
        assert_eq!((at_least_0("0"), at_least_0("1e30")), (Ok(0.0_f32), Ok(1e30_f32)));
        for bad in ["-1", "nan", "inf", "1e39", "x"] {
            assert_eq!(at_least_0::<f32>(bad), Err("expected a number of at least 0".into()), "{bad}");
        }
        assert_eq!(
            (above_0::<f32>("1e-8"), above_0::<f32>("0")),
            (Ok(1e-8), Err("expected a number above 0".into()))
        );
        assert_eq!(seed("9223372036854775807"), Ok(i64::MAX as u64));
        let most = Err("expected a whole number from 0 to 9223372036854775807".into());
        assert_eq!((seed("9223372036854775808"), seed("-1")), (most.clone(), most));
        assert_eq!((fraction("1"), below_1::<f64>("1").is_err()), (Ok(1.0_f32), true));
        assert_eq!(
            (bytes("139GiB"), bytes("0.5 KiB"), bytes("80gb")),
            (Ok(139 << 30), Ok(512), Ok(80_000_000_000))
        );
        for bad in ["", "80", "GiB", "-1GiB", "0B", "nanB", "1e30TiB", "infB", "1 GiB of it", "µ"] {
            assert_eq!(bytes(bad), Err("expected bytes such as 139GiB or 80GB".into()), "{bad}");
        }
        assert_eq!((probability("1"), probability::<f32>("0").is_err()), (Ok(1.0_f32), true));
    }

    #[test]
    fn times_are_read() {
        let seconds = |text: &str| duration(text).map(|time| time.as_secs());
        for (text, want) in [("3h55m", 14_100), ("90m", 5400), ("45s", 45), ("2d", 172_800), ("1h1s", 3601)] {
            assert_eq!(seconds(text), Ok(want), "{text}");
        }
        for text in
            ["", "5", "m", "-3m", "3m2h", "1m1m", "0s", "99999999999999999999h", "3 h", "1.5h", "900000d"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_counted_as_transformers_does() {
        for (text, bytes) in [
            ("300", 300),
            ("7b", 7),
            ("20KB", 20_000),
            (" 1.5 gb ", 1_500_000_000),
            ("2GiB", 2 << 30),
            ("3TB", 3_000_000_000_000),
        ] {
            assert_eq!(file_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GB", "0", "-1GB", "0.1b", "nan", "inf", "1e30", "5 GBs", "five"] {
            assert!(file_size(text).is_err(), "{text}");
        }
    }
}
