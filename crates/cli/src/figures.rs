//! Figures for people: counts, times, rates.

/// A whole number with thousands separators.
pub fn whole(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0.0 && digits != "0" { format!("-{text}") } else { text }
}

/// A number in at most about six characters: `12.3k`, `4.56M`, `0.0012`, `3.1e-5`.
pub fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => format!("{value}"),
        0.0 => "0".into(),
        _ if size >= 1e15 => format!("{value:.1e}"),
        _ if size >= 1e12 => three(value / 1e12) + "T",
        _ if size >= 1e9 => three(value / 1e9) + "G",
        _ if size >= 1e6 => three(value / 1e6) + "M",
        _ if size >= 1e4 => three(value / 1e3) + "k",
        _ if size >= 1e-3 => three(value),
        _ => format!("{value:.1e}"),
    }
}

/// Three digits, or all of those before the point.
fn three(value: f64) -> String {
    let before = value.abs().log10().floor() as i32;
    let text = format!("{value:.*}", (2 - before).clamp(0, 6) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A length of time in its two largest units: `45 s`, `3m20s`, `2h05m`, `4d03h`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "unknown".into();
    }
    let all = seconds.round() as u64;
    match all {
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        0..60 => format!("{all} s"),
        60..3600 => format!("{}m{:02}s", all / 60, all % 60),
        3600..86_400 => format!("{}h{:02}m", all / 3600, all / 60 % 60),
        _ => format!("{}d{:02}h", all / 86_400, all / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_right() {
        assert_eq!([0.0, 999.0, 1234.0, -1_234_567.0].map(whole), ["0", "999", "1,234", "-1,234,567"]);
        assert_eq!(
            [0.0, 1.5, 12.345, 9999.0, 12_345.0, 2_000_000.0, 3e-4, 0.0012, -5.25].map(short),
            ["0", "1.5", "12.3", "9999", "12.3k", "2M", "3.0e-4", "0.0012", "-5.25"]
        );
        assert_eq!(short(f64::NAN), "NaN");
        assert_eq!(
            [0.0, 3.25, 45.0, 200.0, 7500.0, 360_000.0, f64::NAN].map(duration),
            ["0.0 s", "3.2 s", "45 s", "3m20s", "2h05m", "4d04h", "unknown"]
        );
    }
}
