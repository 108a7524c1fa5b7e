//! Axes with round ticks.

/// A range of values with round ticks.
pub struct Axis {
    pub low: f64,
    pub high: f64,
    pub step: f64,
}

impl Axis {
    /// An axis from `low` to `high`.
    pub fn tight(low: f64, high: f64) -> Self {
        // A range of width 0, up to rounding, is widened.
        let width = if high - low > low.abs().max(high.abs()) * 1e-9 { high - low } else { 0.0 };
        let (low, high) = if width > 0.0 { (low, high) } else { (low - 0.5, high + 0.5) };
        // About eight steps at most, of 1, 2 or 5 times a power of ten.
        let rough = (high - low) / 8.0;
        let power = 10.0_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough * 0.95);
        let step = step.unwrap_or(10.0 * power);
        // The last step of a run of 2,000 is 1,999: let the axis reach the tick that is almost there.
        let next = (high / step).ceil() * step;
        let high = if next - high < 0.02 * (high - low) { next } else { high };
        Self { low, high, step }
    }

    /// An axis from the tick below `low` to a little above `high`; from 0 where that is near.
    pub fn loose(low: f64, high: f64) -> Self {
        let low = if low > 0.0 && low < 0.35 * high { 0.0 } else { low };
        let Self { low, high, step } = Self::tight(low, high);
        Self { low: (low / step).floor() * step, high: high + 0.04 * (high - low), step }
    }

    /// An axis from 0 to a little above `high`, for lengths of bars.
    pub fn from_zero(high: f64) -> Self {
        let Self { low, high, step } = Self::tight(0.0, high.max(f64::MIN_POSITIVE));
        Self { low, high: high + 0.04 * (high - low), step }
    }

    /// The position of a value, 0 at the low end and 1 at the high end.
    pub fn place(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    pub fn ticks(&self) -> impl Iterator<Item = f64> + '_ {
        let (first, slack) = ((self.low / self.step - 1e-6).ceil(), 1e-6 * self.step);
        (0..50).map(move |i| (first + f64::from(i)) * self.step).take_while(move |t| *t <= self.high + slack)
    }

    /// The tick with as many digits as the step has, with a thousands separator.
    pub fn label(&self, tick: f64) -> String {
        if self.step < 0.999e-3 {
            if tick.abs() < self.step * 1e-6 {
                return "0".into();
            }
            // powers of ten, as of learning rates: zeros would take the room
            let power = |value: f64| (value.abs() * 1.001).log10().floor();
            let digits = (power(tick) - power(self.step)).clamp(0.0, 9.0) as usize;
            return match format!("{tick:.digits$e}").split_once('e') {
                Some((digits, power)) if digits.contains('.') => {
                    format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
                }
                _ => format!("{tick:.digits$e}"),
            };
        }
        let digits = (-(self.step * 1.001).log10().floor()).clamp(0.0, 9.0) as usize;
        let tick = if tick.abs() < self.step * 1e-6 { 0.0 } else { tick };
        let text = format!("{tick:.digits$}");
        let (sign, digits) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
        if digits.contains('.') || digits.len() <= 4 {
            return text;
        }
        let groups: Vec<&str> =
            digits.as_bytes().rchunks(3).rev().filter_map(|g| str::from_utf8(g).ok()).collect();
        format!("{sign}{}", groups.join(","))
    }
}
