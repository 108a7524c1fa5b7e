//! Loss curves as SVG, drawn by hand: a few hundred bytes of axes, the system's own font, readable on any page.

use std::fmt::Write as _;
use std::path::Path;

use crate::format::atomic;
use crate::{Error, Result};

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A noisy value of every step: a thin pale line, and its running mean in full colour.
    Smoothed,
    /// A value now and then: dots on a line.
    Dots,
    /// A plain line.
    Line,
}

/// One curve.
#[derive(Clone, Debug)]
pub struct Series {
    /// What the legend calls it.
    pub name: String,
    /// (step, loss), by step. Points that are not finite are left out.
    pub points: Vec<(f64, f64)>,
    /// How it is drawn.
    pub style: Style,
}

// The page, and the frame of the plot on it, in SVG units.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 828.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 418.0;

/// Most points a path gets; more than pixels only make the file larger.
const MAX_POINTS: usize = 1500;

/// Blue, orange, green, purple: told apart by readers who do not see all colours.
const COLOURS: [&str; 4] = ["#2563eb", "#ea580c", "#059669", "#9333ea"];

/// Draws the curves and writes them to `path`, aside first and then renamed: a reader never sees half a picture.
pub fn loss_svg(path: &Path, title: &str, series: &[Series]) -> Result<()> {
    let svg = render(title, series)?;
    atomic::write_file(path, |sink| sink.put(svg.as_bytes()))
}

/// The picture as text.
fn render(title: &str, series: &[Series]) -> Result<String> {
    let curves: Vec<Curve> = series.iter().enumerate().map(|(i, s)| Curve::new(s, COLOURS[i % 4])).collect();
    let frame = Frame::around(&curves)
        .ok_or_else(|| Error::Config(format!("plot \"{title}\": there is no finite point to draw")))?;
    let mut svg = String::with_capacity(64 * 1024);
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="Inter, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">
<title>{title}</title>
<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>
<text x="{LEFT}" y="36" font-size="19" font-weight="600" fill="#111827">{title}</text>
"##,
        title = escape(title)
    );
    frame.draw_axes(&mut svg);
    curves.iter().for_each(|curve| curve.draw(&frame, &mut svg));
    draw_legend(&curves, &mut svg);
    svg.push_str("</svg>\n");
    Ok(svg)
}

/// A series made ready: finite points, few enough.
struct Curve {
    name: String,
    colour: &'static str,
    style: Style,
    points: Vec<(f64, f64)>,
    smooth: Vec<(f64, f64)>,
}

impl Curve {
    fn new(series: &Series, colour: &'static str) -> Self {
        let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
        let points: Vec<(f64, f64)> = series.points.iter().filter(finite).copied().collect();
        let smooth = if series.style == Style::Smoothed { smoothed(&points) } else { Vec::new() };
        let name = series.name.clone();
        Self { name, colour, style: series.style, points: thinned(&points), smooth: thinned(&smooth) }
    }

    /// The value the legend shows: the last one of the line in full colour.
    fn last(&self) -> Option<f64> {
        self.smooth.last().or(self.points.last()).map(|p| p.1)
    }

    fn draw(&self, frame: &Frame, svg: &mut String) {
        let colour = self.colour;
        let full = format!(r#"stroke="{colour}" stroke-width="2.2""#);
        match self.style {
            Style::Smoothed => {
                let pale = format!(r#"stroke="{colour}" stroke-width="1" stroke-opacity="0.28""#);
                frame.draw_path(&self.points, &pale, svg);
                frame.draw_path(&self.smooth, &full, svg);
            }
            Style::Line => frame.draw_path(&self.points, &full, svg),
            Style::Dots => {
                let thin = format!(r#"stroke="{colour}" stroke-width="1.6""#);
                frame.draw_path(&self.points, &thin, svg);
                for &(x, y) in &self.points {
                    let (x, y) = (frame.x(x), frame.y(y));
                    let _ = writeln!(
                        svg,
                        r##"<circle cx="{x:.1}" cy="{y:.1}" r="3.6" fill="{colour}" stroke="#ffffff" stroke-width="1.2"/>"##
                    );
                }
            }
        }
    }
}

/// Mean over a window around each point: narrow at the start, where the curve is steep, one-sided at the end, so that the
/// last value is a mean too.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = (points.len() / 60).max(1);
    let mut sums = Vec::with_capacity(points.len() + 1);
    sums.push(0.0);
    points.iter().for_each(|p| sums.push(sums[sums.len() - 1] + p.1));
    let mean = |(i, p): (usize, &(f64, f64))| {
        let back = reach.min(i);
        let (from, to) = (i - back, (i + back + 1).min(points.len()));
        (p.0, (sums[to] - sums[from]) / (to - from) as f64)
    };
    points.iter().enumerate().map(mean).collect()
}

/// At most [`MAX_POINTS`] of the points, the first and the last among them.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let last = points.len() - 1;
    (0..MAX_POINTS).map(|i| points[i * last / (MAX_POINTS - 1)]).collect()
}

/// The part of the plane that is drawn, and where its ticks are.
struct Frame {
    x: Axis,
    y: Axis,
}

impl Frame {
    /// The frame that holds every point; `None` when there is none.
    fn around(curves: &[Curve]) -> Option<Self> {
        let all = || curves.iter().flat_map(|c| &c.points);
        all().next()?;
        let range = |value: fn(&(f64, f64)) -> f64| {
            all().map(value).fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)))
        };
        let (x, y) = (range(|p| p.0), range(|p| p.1));
        Some(Self { x: Axis::tight(x.0, x.1), y: Axis::loose(y.0, y.1) })
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (RIGHT - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - self.y.place(value) * (BOTTOM - TOP)
    }

    fn draw_path(&self, points: &[(f64, f64)], stroke: &str, svg: &mut String) {
        if points.is_empty() {
            return;
        }
        let _ =
            write!(svg, r#"<path fill="none" stroke-linejoin="round" stroke-linecap="round" {stroke} d=""#);
        for (i, &(x, y)) in points.iter().enumerate() {
            let _ = write!(svg, "{}{:.1} {:.1}", if i == 0 { 'M' } else { 'L' }, self.x(x), self.y(y));
        }
        svg.push_str("\"/>\n");
    }

    fn draw_axes(&self, svg: &mut String) {
        svg.push_str("<g font-size=\"13\" fill=\"#4b5563\" stroke-width=\"1\">\n");
        for tick in self.y.ticks() {
            let (y, text) = (self.y(tick), self.y.label(tick));
            let _ = writeln!(
                svg,
                r##"<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1}" y2="{y:.1}" stroke="#e5e7eb"/><text x="{:.1}" y="{:.1}" text-anchor="end">{text}</text>"##,
                LEFT - 10.0,
                y + 4.5
            );
        }
        for tick in self.x.ticks() {
            let (x, text) = (self.x(tick), self.x.label(tick));
            let _ = writeln!(
                svg,
                r##"<line x1="{x:.1}" x2="{x:.1}" y1="{TOP}" y2="{BOTTOM}" stroke="#f3f4f6"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{text}</text>"##,
                BOTTOM + 21.0
            );
        }
        let (middle_x, middle_y) = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
        let _ = writeln!(
            svg,
            r##"<line x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}" stroke="#9ca3af"/>
<text x="{middle_x}" y="{:.1}" text-anchor="middle" font-size="14">step</text>
<text transform="translate(24 {middle_y}) rotate(-90)" text-anchor="middle" font-size="14">loss (nats per token)</text>
</g>"##,
            BOTTOM + 47.0
        );
    }
}

/// The names and last values, right-aligned in the top corner where a falling curve leaves room.
fn draw_legend(curves: &[Curve], svg: &mut String) {
    let widest = curves.iter().map(|c| c.name.chars().count()).max().unwrap_or(0) as f64;
    let (mut y, mark, value) = (TOP + 22.0, RIGHT - 78.0 - 8.0 * widest - 34.0, RIGHT - 16.0);
    let (height, x) = (28.0 + 22.0 * (curves.len() as f64 - 1.0) + 8.0, mark - 14.0);
    let _ = writeln!(
        svg,
        r##"<g font-size="14" fill="#1f2937"><rect x="{x:.1}" y="{:.1}" width="{:.1}" height="{height:.1}" rx="6" fill="#ffffff" fill-opacity="0.88" stroke="#e5e7eb"/>"##,
        TOP,
        RIGHT - x
    );
    for curve in curves {
        let (colour, line) = (curve.colour, y - 4.5);
        let _ = write!(
            svg,
            r#"<line x1="{mark:.1}" x2="{:.1}" y1="{line:.1}" y2="{line:.1}" stroke="{colour}" stroke-width="2.4" stroke-linecap="round"/>"#,
            mark + 24.0
        );
        if curve.style == Style::Dots {
            let _ =
                write!(svg, r#"<circle cx="{:.1}" cy="{line:.1}" r="3.8" fill="{colour}"/>"#, mark + 12.0);
        }
        let last = curve.last().map_or(String::new(), |v| format!("{v:.3}"));
        let _ = writeln!(
            svg,
            r#"<text x="{:.1}" y="{y:.1}">{}</text><text x="{value:.1}" y="{y:.1}" text-anchor="end" font-weight="600">{last}</text>"#,
            mark + 34.0,
            escape(&curve.name)
        );
        y += 22.0;
    }
    svg.push_str("</g>\n");
}

/// A range of values with round ticks.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    /// From `low` to `high`.
    fn tight(low: f64, high: f64) -> Self {
        // A range without width, or lost in rounding, still needs a picture.
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

    /// From the tick below `low` to a little above `high`; from 0 where that is near.
    fn loose(low: f64, high: f64) -> Self {
        let low = if low > 0.0 && low < 0.35 * high { 0.0 } else { low };
        let Self { low, high, step } = Self::tight(low, high);
        Self { low: (low / step).floor() * step, high: high + 0.04 * (high - low), step }
    }

    /// Where a value lies, 0 at the low end and 1 at the high end.
    fn place(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + '_ {
        let (first, slack) = ((self.low / self.step - 1e-6).ceil(), 1e-6 * self.step);
        (0..50).map(move |i| (first + f64::from(i)) * self.step).take_while(move |t| *t <= self.high + slack)
    }

    /// The tick with as many digits as the step has; thousands set apart.
    fn label(&self, tick: f64) -> String {
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

/// Text as XML writes it.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use std::fs;

    /// What a run looks like: 2,000 noisy steps and a validation loss every 200.
    fn run() -> Vec<Series> {
        let mut rng = Rng::new(1);
        let loss = |step: f64| 0.72 + 4.83 * (-step / 180.0).exp() + 0.5 * (-step / 900.0).exp();
        let noisy = |i: i32| (f64::from(i), loss(f64::from(i)) * (1.0 + 0.045 * rng.normal()));
        let train = (0..2000).map(noisy).collect();
        let val = (0..=10).map(|i| (f64::from(i) * 200.0, loss(f64::from(i) * 200.0) + 0.03)).collect();
        vec![
            Series { name: "train".into(), points: train, style: Style::Smoothed },
            Series { name: "validation".into(), points: val, style: Style::Dots },
        ]
    }

    #[test]
    fn writes_one_picture_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        loss_svg(&path, "a < b & \"c\"", &run()).unwrap();
        loss_svg(&path, "a < b & \"c\"", &run()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let svg = fs::read_to_string(&path).unwrap();
        assert!(
            svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.len() < 100_000,
            "{}",
            svg.len()
        );
        for part in
            ["a &lt; b &amp; &quot;c&quot;", ">validation<", ">train<", ">step<", ">loss (nats per token)<"]
        {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        let text = loss_svg(&dir.path().join("no/loss.svg"), "t", &run()).unwrap_err().to_string();
        assert!(text.contains("loss.svg"), "{text}");
    }

    #[test]
    fn awkward_series() {
        let series = |points: Vec<(f64, f64)>| Series { name: "s".into(), points, style: Style::Smoothed };
        for points in
            [vec![(0.0, 3.0)], vec![(5.0, 2.0); 3], vec![(0.0, f64::NAN), (1.0, 2.0), (2.0, f64::INFINITY)]]
        {
            let svg = render("t", &[series(points), series(vec![])]).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert!(render("t", &[]).is_err());
        assert!(render("t", &[series(vec![(0.0, f64::NAN)])]).is_err());
    }

    #[test]
    fn ticks_are_round() {
        let labels = |a: Axis| a.ticks().map(|t| a.label(t)).collect::<Vec<_>>();
        assert_eq!(labels(Axis::loose(0.7, 5.6)), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(labels(Axis::loose(3.28, 3.41)), ["3.28", "3.30", "3.32", "3.34", "3.36", "3.38", "3.40"]);
        assert_eq!(labels(Axis::tight(0.0, 20_000.0)), ["0", "5000", "10,000", "15,000", "20,000"]);
        assert_eq!(labels(Axis::tight(0.0, 1999.0)), ["0", "500", "1000", "1500", "2000"]);
    }

    #[test]
    fn smoothing_keeps_a_line_until_the_window_meets_the_end() {
        let line: Vec<(f64, f64)> = (0..500).map(|i| (f64::from(i), 2.0 * f64::from(i))).collect();
        let smooth = smoothed(&line);
        assert!(smooth.iter().zip(&line).take(492).all(|(a, b)| (a.1 - b.1).abs() < 1e-9));
        assert_eq!(smooth[499], (499.0, 2.0 * (499.0 - 4.0)));
        let many: Vec<(f64, f64)> = (0..100_000).map(|i| (f64::from(i), 0.0)).collect();
        let few = thinned(&many);
        assert_eq!((few.len(), few[0].0, few[MAX_POINTS - 1].0), (MAX_POINTS, 0.0, 99_999.0));
    }
}
