//! A picture of how tokens spread over experts: a row for each layer, a column for each expert.

use std::fmt::Write as _;
use std::path::Path;

use crate::Result;
use crate::format::atomic;

/// The picture's measures.
const CELL_HEIGHT: f64 = 24.0;
const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const TOP: f64 = 84.0;
const RIGHT: f64 = 30.0;
/// Narrower cells have no room for a number.
const LEAST_FOR_TEXT: f64 = 34.0;

/// Draws the shares (layers × experts) and writes them to `path`, aside first and then renamed.
pub fn load_svg(path: &Path, load: &[Vec<f64>]) -> Result<()> {
    let svg = render(load);
    atomic::write_file(path, |sink| sink.put(svg.as_bytes()))
}

fn render(load: &[Vec<f64>]) -> String {
    let experts = load.first().map_or(1, Vec::len).max(1);
    let cell = (WIDTH - LEFT - RIGHT) / experts as f64;
    let height = TOP + CELL_HEIGHT * load.len() as f64 + 30.0;
    let mut svg = String::new();
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="Inter, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">
<title>load of the experts</title>
<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>
<text x="{LEFT}" y="36" font-size="19" font-weight="600" fill="#111827">load of the experts</text>
<text x="{LEFT}" y="58" font-size="13" fill="#6b7280">percent of the tokens that each expert gets; white is an even share, blue less, orange more</text>
"##
    );
    for e in (0..experts).filter(|_| cell >= LEAST_FOR_TEXT) {
        let x = LEFT + cell * (e as f64 + 0.5);
        let _ = writeln!(
            svg,
            r##"<text x="{x:.1}" y="{:.1}" font-size="11" text-anchor="middle" fill="#6b7280">{e}</text>"##,
            TOP - 6.0
        );
    }
    for (l, row) in load.iter().enumerate() {
        let y = TOP + CELL_HEIGHT * l as f64;
        let _ = writeln!(
            svg,
            r##"<text x="{:.1}" y="{:.1}" font-size="11" text-anchor="end" fill="#6b7280">layer {l}</text>"##,
            LEFT - 8.0,
            y + 16.0
        );
        let even = row.iter().sum::<f64>() / row.len().max(1) as f64;
        for (e, &share) in row.iter().enumerate() {
            draw_cell(&mut svg, [LEFT + cell * e as f64, y, cell], share, even);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_cell(svg: &mut String, [x, y, width]: [f64; 3], share: f64, even: f64) {
    // equal steps of colour for equal factors; four times or a quarter of the even share is full colour
    let off = if even > 0.0 { (share / even).max(1e-3).log2() / 2.0 } else { 0.0 };
    let (colour, opacity) = (if off > 0.0 { "#ea580c" } else { "#2563eb" }, off.abs().min(1.0));
    let height = CELL_HEIGHT;
    let _ = writeln!(
        svg,
        r##"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height}" fill="{colour}" fill-opacity="{opacity:.3}" stroke="#e5e7eb"/>"##
    );
    if width >= LEAST_FOR_TEXT {
        let _ = writeln!(
            svg,
            r##"<text x="{:.1}" y="{:.1}" font-size="11" text-anchor="middle" fill="#111827">{:.1}</text>"##,
            x + width / 2.0,
            y + 16.0,
            100.0 * share
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expert_has_a_cell_and_its_share() {
        let svg = render(&[vec![0.5, 0.5, 0.5, 0.5], vec![1.0, 0.25, 0.75, 0.0]]);
        assert_eq!(svg.matches("<rect").count(), 1 + 8);
        for text in
            ["layer 1", ">50.0<", ">100.0<", ">0.0<", "fill-opacity=\"1.000\"", "fill-opacity=\"0.000\""]
        {
            assert!(svg.contains(text), "{text}");
        }
        let many = render(&[vec![1.0 / 64.0; 64]]);
        assert_eq!((many.matches("<rect").count(), many.matches("text-anchor=\"middle\"").count()), (65, 0));
        assert!(!render(&[]).contains("NaN"));
    }
}
