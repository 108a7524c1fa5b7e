//! How the loads of experts changed: a band for each layer, in it a line for each expert, over the steps.

use super::axis::Axis;
use super::svg::{Anchor, BASE, COLOURS, FINE_GRID, LABEL, PALE, SMALL, Svg};
use crate::run::view::Loads;
use std::fmt::Write as _;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 84.0;
/// Between two bands.
const GAP: f64 = 10.0;
/// Height of a band, if the lines of its experts are neither too low nor too high for it.
const BAND: f64 = 96.0;
/// More columns and lines would make a large file. Where there are more layers, some of them are shown.
const MOST_COLUMNS: usize = 64;
const MOST_LINES: usize = 128;
/// Steps of colour from an even share to full colour.
const LEVELS: f64 = 8.0;

/// Draws the loads over the steps; `None` where there are fewer than two readings, or no experts.
pub fn loads_text(loads: &Loads) -> Option<String> {
    let loads = loads.at_most(MOST_COLUMNS);
    let all: Vec<_> = (0..loads.layers()).map(|layer| loads.of_layer(layer)).collect();
    let experts = all.iter().map(|spans| spans.last().map_or(0, |span| span.1.len())).max()?;
    let spans = all.iter().max_by_key(|spans| spans.len())?;
    let (first, last) = (spans.first()?.0, spans.last()?.0 + loads.width);
    if experts == 0 || spans.len() < 2 {
        return None;
    }
    let shown = (MOST_LINES / experts).clamp(1, all.len());
    let layers: Vec<usize> =
        (0..shown).map(|i| i * (all.len() - 1) / shown.max(2).saturating_sub(1)).collect();
    let line = (BAND / experts as f64).clamp(3.0, 14.0);
    let band = line * experts as f64;
    let bottom = TOP + (band + GAP) * shown as f64;
    let axis = Axis::tight(first as f64, last as f64);
    let at = |step: u64| LEFT + (WIDTH - LEFT - RIGHT) * axis.place(step as f64);
    let what = "a line for each expert, expert 0 above; blank is an even share, orange lines of full height more, blue lines of half \
                the height less";
    let mut svg = Svg::new([WIDTH, bottom + 44.0], LEFT, "load of the experts over the steps", what);
    for tick in axis.ticks() {
        let x = LEFT + (WIDTH - LEFT - RIGHT) * axis.place(tick);
        svg.line([x, TOP], [x, bottom - GAP], &format!(r#"stroke="{FINE_GRID}""#));
        svg.text([x, bottom + 8.0], &axis.label(tick), (SMALL, LABEL, Anchor::Middle));
    }
    svg.text([(LEFT + WIDTH - RIGHT) / 2.0, bottom + 28.0], "step", (SMALL, LABEL, Anchor::Middle));
    for (place, &layer) in layers.iter().enumerate() {
        let top = TOP + (band + GAP) * place as f64;
        svg.text([LEFT - 8.0, top + band / 2.0 + 4.0], &format!("layer {layer}"), (SMALL, PALE, Anchor::End));
        for y in [top, top + band] {
            svg.line([at(first), y], [at(last), y], &format!(r#"stroke="{BASE}" stroke-width="0.5""#));
        }
        for (level, cells) in cells(&all[layer], loads.width) {
            let (colour, height) = if level > 0.0 { (COLOURS[1], line) } else { (COLOURS[0], line / 2.0) };
            let mut d = String::new();
            for (expert, [from, to]) in cells {
                let y = top + line * expert as f64 + (line - height) / 2.0;
                let (x, wide) = (at(from), at(to) - at(from));
                let _ = write!(d, "M{x:.1} {y:.1}h{wide:.1}v{height:.1}h-{wide:.1}z");
            }
            svg.shape(&d, &format!(r#"fill="{colour}" fill-opacity="{:.3}""#, level.abs() / LEVELS));
        }
    }
    Some(svg.finish())
}

/// An expert, the first step of a cell, and the one after its last.
type Cell = (usize, [u64; 2]);

/// The cells of a layer that are not blank by their level of colour. Neighbours of one level are one cell.
fn cells(spans: &[(u64, Vec<f32>)], width: u64) -> Vec<(f64, Vec<Cell>)> {
    let mut levels: Vec<(f64, Vec<Cell>)> = Vec::new();
    let experts = spans.last().map_or(0, |span| span.1.len());
    for expert in 0..experts {
        let mut before: Option<(f64, u64)> = None;
        for (step, shares) in spans {
            // equal steps of colour for equal factors; four times or a quarter of the even share is full colour
            let off = (f64::from(shares[expert]) * experts as f64).max(1e-3).log2() / 2.0;
            let level = (off.clamp(-1.0, 1.0) * LEVELS).round();
            let joins = before == Some((level, *step));
            before = Some((level, step + width));
            if level == 0.0 {
                continue;
            }
            let place = levels.iter().position(|one| one.0 == level).unwrap_or_else(|| {
                levels.push((level, Vec::new()));
                levels.len() - 1
            });
            match levels[place].1.last_mut() {
                Some(last) if joins && last.0 == expert => last.1[1] = step + width,
                _ => levels[place].1.push((expert, [*step, step + width])),
            }
        }
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::LayerRouting;

    fn loads(steps: u64, layers: usize, load: impl Fn(u64) -> Vec<f32>) -> Loads {
        let mut loads = Loads::default();
        for step in 0..steps {
            let layer = LayerRouting { load: load(step), entropy: 0.1, aux: 0.1 };
            loads.push(step, &vec![layer; layers]);
        }
        loads
    }

    #[test]
    fn more_is_a_full_line_less_a_half_and_even_is_blank() {
        // even for ten steps, then the first expert has all
        let svg =
            loads_text(&loads(20, 1, |step| if step < 10 { vec![0.5; 2] } else { vec![1.0, 0.0] })).unwrap();
        assert_eq!(svg.matches("<path").count(), 2, "{svg}");
        // two experts: lines of 14; from the middle of 840 pixels on; twice an even share is half of full colour
        for (d, colour, opacity) in [
            ("M510.0 84.0h420.0v14.0h-420.0z", COLOURS[1], "0.500"),
            ("M510.0 101.5h420.0v7.0h-420.0z", COLOURS[0], "1.000"),
        ] {
            let path = format!(r#"<path d="{d}" fill="{colour}" fill-opacity="{opacity}"/>"#);
            assert!(svg.contains(&path), "{path} is not in {svg}");
        }
        assert!(svg.contains(">layer 0<") && svg.contains(">step<") && svg.contains(">20<"));
    }

    #[test]
    fn any_run_is_a_small_picture() {
        let uneven = |step: u64| (0..64_u64).map(|e| ((step * 7919 + e * 104_729) % 1000) as f32).collect();
        let svg = loads_text(&loads(3000, 32, uneven)).unwrap();
        assert!(svg.len() < 200_000, "{} bytes", svg.len());
        assert!(svg.contains(">layer 0<") && svg.contains(">layer 31<") && !svg.contains("NaN"));
        let few = loads_text(&loads(200, 5, |_| vec![0.9, 0.1])).unwrap();
        assert_eq!((0..5).filter(|l| few.contains(&format!(">layer {l}<"))).count(), 5);
        assert_eq!(loads_text(&loads(1, 1, |_| vec![1.0])), None, "one reading is no history");
        assert_eq!(loads_text(&Loads::default()), None);
        assert_eq!(loads_text(&loads(9, 2, |_| Vec::new())), None);
    }
}
