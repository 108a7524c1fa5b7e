//! Loss curves.

use super::axis::Axis;
use super::svg::{
    self, Anchor, BASE, COLOURS, DASHES, FINE_GRID, GRID, INK, LABEL, LARGE, NORMAL, PAGE, Svg,
};
use super::thin::thin;
use crate::{Error, Result};
use std::path::Path;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A noisy value of every step: a thin pale line, and its running mean on top.
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
    /// (step, loss), by step. NaN and infinite points are left out.
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

/// Columns for which a path keeps the first, lowest, highest and last point; more than pixels only make the file larger.
const COLUMNS: usize = 375;

/// What a picture of curves shows.
#[derive(Clone, Copy, Debug)]
pub struct Plot<'a> {
    /// What it is.
    pub title: &'a str,
    /// What runs across, such as `step`.
    pub across: &'a str,
    /// What runs upwards, with its unit.
    pub upward: &'a str,
}

/// What losses are called.
const LOSS: &str = "loss (nats per token)";

/// Draws losses by step and writes the picture to `path`.
pub fn loss_svg(path: &Path, title: &str, series: &[Series]) -> Result<()> {
    curves_svg(path, title, "step", series)
}

/// Draws losses by `across` and writes the picture to `path`.
pub fn curves_svg(path: &Path, title: &str, across: &str, series: &[Series]) -> Result<()> {
    svg::write(path, &curves_text(Plot { title, across, upward: LOSS }, series)?)
}

/// Draws curves, as the text of an SVG picture.
pub fn curves_text(plot: Plot<'_>, series: &[Series]) -> Result<String> {
    let title = plot.title;
    let curves: Vec<Curve> =
        series.iter().enumerate().map(|(i, s)| Curve::new(s, i % COLOURS.len())).collect();
    let frame = Frame::around(&curves)
        .ok_or_else(|| Error::input(format!("plot \"{title}\""), "without a finite point", "one to draw"))?;
    let mut svg = Svg::new([WIDTH, HEIGHT], LEFT, title, "");
    frame.draw_axes(plot, &mut svg);
    curves.iter().for_each(|curve| curve.draw(&frame, &mut svg));
    draw_legend(&curves, &mut svg);
    Ok(svg.finish())
}

/// A series ready to draw: only finite points, thinned.
struct Curve {
    name: String,
    colour: &'static str,
    dash: &'static str,
    style: Style,
    points: Vec<(f64, f64)>,
    smooth: Vec<(f64, f64)>,
}

impl Curve {
    fn new(series: &Series, look: usize) -> Self {
        let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
        let points: Vec<(f64, f64)> = series.points.iter().filter(finite).copied().collect();
        let smooth = if series.style == Style::Smoothed { smoothed(&points) } else { Vec::new() };
        Self {
            name: series.name.clone(),
            colour: COLOURS[look],
            dash: DASHES[look],
            style: series.style,
            points: thin(&points, COLUMNS),
            smooth: thin(&smooth, COLUMNS),
        }
    }

    /// The value the legend shows: the last one of the line in full colour.
    fn last(&self) -> Option<f64> {
        self.smooth.last().or(self.points.last()).map(|p| p.1)
    }

    /// The line in full colour, with the dashes of the series.
    fn stroke(&self) -> String {
        let dash = if self.dash.is_empty() {
            String::new()
        } else {
            format!(r#" stroke-dasharray="{}""#, self.dash)
        };
        format!(r#"stroke="{}" stroke-width="2"{dash}"#, self.colour)
    }

    fn draw(&self, frame: &Frame, svg: &mut Svg) {
        let at = |&(x, y): &(f64, f64)| [frame.x(x), frame.y(y)];
        if self.style == Style::Smoothed {
            let pale = format!(r#"stroke="{}" stroke-width="1" stroke-opacity="0.28""#, self.colour);
            svg.path(self.points.iter().map(at), &pale);
            svg.path(self.smooth.iter().map(at), &self.stroke());
            return;
        }
        svg.path(self.points.iter().map(at), &self.stroke());
        if self.style == Style::Dots {
            self.points.iter().for_each(|point| svg.dot(at(point), self.colour));
        }
    }
}

/// Mean over a window around each point: narrow at the start, where the curve is steep, one-sided at the end, so that the
/// last value is a mean too.
pub(crate) fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    smoothed_over(points, (points.len() / 60).max(1))
}

/// The same with a window of up to `reach` points on either side.
pub fn smoothed_over(points: &[(f64, f64)], reach: usize) -> Vec<(f64, f64)> {
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

    fn draw_axes(&self, plot: Plot<'_>, svg: &mut Svg) {
        for tick in self.y.ticks() {
            let y = self.y(tick);
            svg.line([LEFT, y], [RIGHT, y], &format!(r#"stroke="{GRID}""#));
            svg.text([LEFT - 10.0, y + 4.5], &self.y.label(tick), (NORMAL, LABEL, Anchor::End));
        }
        for tick in self.x.ticks() {
            let x = self.x(tick);
            svg.line([x, TOP], [x, BOTTOM], &format!(r#"stroke="{FINE_GRID}""#));
            svg.text([x, BOTTOM + 21.0], &self.x.label(tick), (NORMAL, LABEL, Anchor::Middle));
        }
        svg.line([LEFT, BOTTOM], [RIGHT, BOTTOM], &format!(r#"stroke="{BASE}""#));
        svg.text([(LEFT + RIGHT) / 2.0, BOTTOM + 47.0], plot.across, (LARGE, LABEL, Anchor::Middle));
        svg.upward_text([24.0, (TOP + BOTTOM) / 2.0], plot.upward);
    }
}

/// The names and last values, right-aligned in the top corner where a falling curve leaves room.
fn draw_legend(curves: &[Curve], svg: &mut Svg) {
    let widest = curves.iter().map(|c| c.name.chars().count()).max().unwrap_or(0) as f64;
    let (mut y, mark) = (TOP + 22.0, RIGHT - 78.0 - 8.0 * widest - 34.0);
    let (height, x) = (28.0 + 22.0 * (curves.len() as f64 - 1.0) + 8.0, mark - 14.0);
    let box_style = format!(r#"rx="6" fill="{PAGE}" fill-opacity="0.88" stroke="{GRID}""#);
    svg.rect([x, TOP], [RIGHT - x, height], &box_style);
    for curve in curves {
        let line = y - 4.5;
        svg.line([mark, line], [mark + 26.0, line], &curve.stroke());
        if curve.style == Style::Dots {
            svg.dot([mark + 13.0, line], curve.colour);
        }
        let last = curve.last().map_or(String::new(), figure);
        svg.text([mark + 36.0, y], &curve.name, (LARGE, INK, Anchor::Start));
        svg.text([RIGHT - 16.0, y], &last, (LARGE, INK, Anchor::End));
        y += 22.0;
    }
}

/// A value with enough digits, whatever its size.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 0.1 || size == 0.0 => format!("{value:.3}"),
        _ => format!("{value:.2e}"),
    }
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

    fn render(series: &[Series]) -> Result<String> {
        curves_text(Plot { title: "t", across: "step", upward: "loss" }, series)
    }

    #[test]
    fn a_spike_is_drawn_in_a_run_of_any_length() {
        let mut points: Vec<(f64, f64)> = (0..200_000).map(|i| (f64::from(i), 2.0)).collect();
        points[123_457].1 = 9.0;
        let svg = render(&[Series { name: "s".into(), points, style: Style::Line }]).unwrap();
        assert!(svg.contains(">8<"), "the axis reaches it");
        let path = svg.lines().find(|line| line.contains(" d=\"M")).unwrap();
        let highest = path.split(['M', 'L']).skip(1).filter_map(|point| {
            point.trim_end_matches(|c: char| !c.is_ascii_digit()).split(' ').nth(1)?.parse::<f64>().ok()
        });
        assert!(highest.fold(f64::INFINITY, f64::min) < TOP + 40.0, "the line does, too");
        assert_eq!([12_345.6, 2.5, 3e-4, 0.0].map(figure), ["12346", "2.500", "3.00e-4", "0.000"]);
    }

    #[test]
    fn awkward_series() {
        let series = |points: Vec<(f64, f64)>| Series { name: "s".into(), points, style: Style::Smoothed };
        for points in
            [vec![(0.0, 3.0)], vec![(5.0, 2.0); 3], vec![(0.0, f64::NAN), (1.0, 2.0), (2.0, f64::INFINITY)]]
        {
            let svg = render(&[series(points), series(vec![])]).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert!(render(&[]).is_err());
        assert!(render(&[series(vec![(0.0, f64::NAN)])]).is_err());
    }

    #[test]
    fn ticks_are_round() {
        let labels = |a: Axis| a.ticks().map(|t| a.label(t)).collect::<Vec<_>>();
        assert_eq!(labels(Axis::loose(0.7, 5.6)), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(labels(Axis::loose(3.28, 3.41)), ["3.28", "3.30", "3.32", "3.34", "3.36", "3.38", "3.40"]);
        assert_eq!(labels(Axis::tight(0.0, 20_000.0)), ["0", "5000", "10,000", "15,000", "20,000"]);
        assert_eq!(labels(Axis::tight(0.0, 1999.0)), ["0", "500", "1000", "1500", "2000"]);
        let rates = ["0", "5e-5", "1e-4", "1.5e-4", "2e-4", "2.5e-4", "3e-4"];
        assert_eq!(labels(Axis::loose(1e-6, 3e-4)), rates);
    }

    #[test]
    fn smoothing_keeps_a_line_until_the_window_meets_the_end() {
        let line: Vec<(f64, f64)> = (0..500).map(|i| (f64::from(i), 2.0 * f64::from(i))).collect();
        let smooth = smoothed(&line);
        assert!(smooth.iter().zip(&line).take(492).all(|(a, b)| (a.1 - b.1).abs() < 1e-9));
        assert_eq!(smooth[499], (499.0, 2.0 * (499.0 - 4.0)));
        assert_eq!(smoothed_over(&line, 0), line);
    }
}
