//! Times as bars: of each the part that the device needs at its limits is filled, the rest is outlined.

use super::axis::Axis;
use super::svg::{self, Anchor, BASE, COLOURS, FINE_GRID, INK, LABEL, LARGE, NORMAL, PALE, SMALL, Svg};
use crate::Result;
use std::path::Path;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 240.0;
const RIGHT: f64 = 820.0;
const TOP: f64 = 104.0;
const ROW: f64 = 22.0;
const BAR: f64 = 14.0;
/// The longest name that fits left of the bars.
const MOST_CHARS: usize = 34;

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// What took the time.
    pub name: String,
    /// How long, in milliseconds.
    pub ms: f64,
    /// The part of it that the device needs at its limits, 0 to 1; `None` where it is not known.
    pub of_possible: Option<f64>,
    /// Written behind the bar, such as its share.
    pub note: String,
}

/// A picture of bars.
#[derive(Clone, Debug)]
pub struct Bars {
    /// What is shown.
    pub title: String,
    /// On what, and how it was measured.
    pub subtitle: String,
    /// The bars from top to bottom.
    pub bars: Vec<Bar>,
}

/// Draws the bars and writes them to `path`.
pub fn bars_svg(path: &Path, picture: &Bars) -> Result<()> {
    svg::write(path, &render(picture))
}

fn render(picture: &Bars) -> String {
    let bottom = TOP + ROW * picture.bars.len() as f64;
    let mut svg = Svg::new([WIDTH, bottom + 60.0], 24.0, &picture.title, &picture.subtitle);
    let longest = picture.bars.iter().map(|bar| bar.ms).filter(|ms| ms.is_finite()).fold(0.0, f64::max);
    let axis = Axis::from_zero(longest);
    let x = |ms: f64| LEFT + axis.place(ms) * (RIGHT - LEFT);
    for tick in axis.ticks() {
        svg.line([x(tick), TOP - 6.0], [x(tick), bottom], &format!(r#"stroke="{FINE_GRID}""#));
        svg.text([x(tick), bottom + 18.0], &axis.label(tick), (NORMAL, LABEL, Anchor::Middle));
    }
    svg.line([LEFT, bottom], [RIGHT, bottom], &format!(r#"stroke="{BASE}""#));
    svg.text([(LEFT + RIGHT) / 2.0, bottom + 44.0], "milliseconds of a step", (LARGE, LABEL, Anchor::Middle));
    draw_legend(&mut svg);
    for (i, bar) in picture.bars.iter().enumerate() {
        let y = TOP + ROW * i as f64;
        svg.text([LEFT - 8.0, y + 12.0], &shortened(&bar.name), (NORMAL, INK, Anchor::End));
        let ms = if bar.ms.is_finite() { bar.ms.max(0.0) } else { 0.0 };
        svg.rect([LEFT, y], [x(ms) - LEFT, BAR], &outlined());
        if let Some(part) = bar.of_possible.filter(|part| part.is_finite()) {
            let part = part.clamp(0.0, 1.0);
            svg.rect([LEFT, y], [(x(ms) - LEFT) * part, BAR], &filled());
        }
        svg.text([x(ms) + 6.0, y + 11.5], &bar.note, (SMALL, PALE, Anchor::Start));
    }
    svg.finish()
}

fn outlined() -> String {
    let colour = COLOURS[0];
    format!(r#"fill="{colour}" fill-opacity="0.12" stroke="{colour}" stroke-width="1""#)
}

fn filled() -> String {
    format!(r#"fill="{}""#, COLOURS[0])
}

fn draw_legend(svg: &mut Svg) {
    let y = 74.0;
    for (x, style, text) in
        [(LEFT, filled(), "needed at the measured limits"), (LEFT + 260.0, outlined(), "taken on top")]
    {
        svg.rect([x, y], [24.0, 10.0], &style);
        svg.text([x + 32.0, y + 9.5], text, (NORMAL, LABEL, Anchor::Start));
    }
}

/// A name cut in the middle, where kernels of one family differ least.
fn shortened(name: &str) -> String {
    let chars: Vec<char> = name.chars().collect();
    if chars.len() <= MOST_CHARS {
        return name.to_owned();
    }
    let half = (MOST_CHARS - 1) / 2;
    chars[..half].iter().chain(&['…']).chain(&chars[chars.len() - half..]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_names_lengths_and_what_was_possible() {
        let bar =
            |name: &str, ms, of_possible| Bar { name: name.into(), ms, of_possible, note: "50.0 %".into() };
        let bars = vec![
            bar("linear_fwd", 8.0, Some(0.5)),
            bar("a < b", 2.0, None),
            bar(&"x".repeat(60), 0.0, Some(f64::NAN)),
        ];
        let picture = Bars { title: "profile".into(), subtitle: "d12 on the CPU".into(), bars };
        let svg = render(&picture);
        // the page, two of the legend, three bars and one filled part
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 3 + 1);
        for text in ["linear_fwd", "a &lt; b", "…", "50.0 %", "milliseconds of a step", "d12 on the CPU"] {
            assert!(svg.contains(text), "{text}");
        }
        let width = |svg: &str, style: &str| -> f64 {
            let line = svg.lines().filter(|line| line.ends_with(&format!("{style}/>"))).nth(1).unwrap();
            line.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        let (all, part) = (width(&svg, &outlined()), width(&svg, &filled()));
        assert!((part - all / 2.0).abs() < 0.2, "{part} of {all}");
        assert!(!svg.contains("NaN"));
        assert!(!render(&Bars { bars: Vec::new(), ..picture }).contains("NaN"));
    }
}
