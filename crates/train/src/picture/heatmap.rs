//! How tokens spread over experts: a row for each layer, a column for each expert.

use super::svg::{self, Anchor, COLOURS, GRID, INK, PALE, SMALL, Svg};
use crate::Result;
use std::path::Path;

const CELL_HEIGHT: f64 = 24.0;
const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const TOP: f64 = 84.0;
const RIGHT: f64 = 30.0;
/// Narrower cells have no room for a number.
const LEAST_FOR_TEXT: f64 = 34.0;
/// The distance to an even share, in units of full colour, from which on a triangle points up or down.
const FAR: f64 = 0.25;

/// Draws the loads (layers × experts) and writes them to `path`. The loads of a layer are normalised to sum to 100 %,
/// whatever number of experts a token gets.
pub fn load_svg(path: &Path, load: &[Vec<f64>]) -> Result<()> {
    svg::write(path, &load_text(load))
}

/// The same as text.
pub fn load_text(load: &[Vec<f64>]) -> String {
    let experts = load.first().map_or(1, Vec::len).max(1);
    let cell = (WIDTH - LEFT - RIGHT) / experts as f64;
    let height = TOP + CELL_HEIGHT * load.len() as f64 + 30.0;
    let what = "share of the routed tokens in percent, each layer sums to 100; white is an even share, orange and \u{25b2} more, \
                blue and \u{25bc} less";
    let mut svg = Svg::new([WIDTH, height], LEFT, "load of the experts", what);
    for e in (0..experts).filter(|_| cell >= LEAST_FOR_TEXT) {
        let x = LEFT + cell * (e as f64 + 0.5);
        svg.text([x, TOP - 6.0], &e.to_string(), (SMALL, PALE, Anchor::Middle));
    }
    for (l, row) in load.iter().enumerate() {
        let y = TOP + CELL_HEIGHT * l as f64;
        svg.text([LEFT - 8.0, y + 16.0], &format!("layer {l}"), (SMALL, PALE, Anchor::End));
        let sum = row.iter().sum::<f64>();
        for (e, &load) in row.iter().enumerate() {
            let share = if sum > 0.0 { load / sum } else { 0.0 };
            draw_cell(&mut svg, [LEFT + cell * e as f64, y, cell], share, 1.0 / row.len() as f64);
        }
    }
    svg.finish()
}

fn draw_cell(svg: &mut Svg, [x, y, width]: [f64; 3], share: f64, even: f64) {
    // equal steps of colour for equal factors; four times or a quarter of the even share is full colour
    let off = (share / even).max(1e-3).log2() / 2.0;
    let (colour, opacity) = (if off > 0.0 { COLOURS[1] } else { COLOURS[0] }, off.abs().min(1.0));
    let style = format!(r#"fill="{colour}" fill-opacity="{opacity:.3}" stroke="{GRID}""#);
    svg.rect([x, y], [width, CELL_HEIGHT], &style);
    if off.abs() >= FAR && width >= 8.0 {
        let at = if off > 0.0 { y + 8.0 } else { y + 3.0 };
        svg.triangle([x + 2.0, at], off > 0.0);
    }
    if width >= LEAST_FOR_TEXT {
        let text = format!("{:.1}", 100.0 * share);
        svg.text([x + width / 2.0, y + 16.0], &text, (SMALL, INK, Anchor::Middle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expert_has_a_cell_and_its_share_of_a_hundred() {
        // two experts for each token: the loads sum to 2, the shares to 100
        let svg = load_text(&[vec![0.5, 0.5, 0.5, 0.5], vec![1.0, 0.25, 0.75, 0.0]]);
        assert_eq!(svg.matches("<rect").count(), 1 + 8);
        for text in ["layer 1", ">25.0<", ">50.0<", ">12.5<", ">37.5<", ">0.0<", "each layer sums to 100"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.contains("fill-opacity=\"1.000\"") && svg.contains("fill-opacity=\"0.000\""));
        let many = load_text(&[vec![1.0 / 64.0; 64]]);
        assert_eq!((many.matches("<rect").count(), many.matches("text-anchor=\"middle\"").count()), (65, 0));
        assert!(!load_text(&[]).contains("NaN") && !load_text(&[vec![0.0; 3]]).contains("NaN"));
    }

    #[test]
    fn more_and_less_are_told_apart_without_colour() {
        let svg = load_text(&[vec![0.7, 0.1, 0.1, 0.1]]);
        assert_eq!((svg.matches("l-3 -5z").count(), svg.matches("l-3 5z").count()), (1, 3));
        assert_eq!(load_text(&[vec![0.25; 4]]).matches("l-3").count(), 0);
    }
}
