//! The one style of all pictures: page, font, colours, grid, dashes; and the text of an SVG file.

use crate::Result;
use crate::format::atomic;
use std::fmt::Write as _;
use std::path::Path;

/// Blue, orange, green, purple: told apart by most readers who do not see all colours.
pub const COLOURS: [&str; 4] = ["#2563eb", "#ea580c", "#059669", "#9333ea"];
/// Dashes of the same series, so that lines are told apart in black and white, too.
pub const DASHES: [&str; 4] = ["", "7 4", "2 4", "10 4 2 4"];
/// The background.
pub const PAGE: &str = "#ffffff";
/// Title, labels, secondary text.
pub const INK: &str = "#111827";
pub const LABEL: &str = "#4b5563";
pub const PALE: &str = "#6b7280";
/// The base line, the grid, the grid across it.
pub const BASE: &str = "#9ca3af";
pub const GRID: &str = "#e5e7eb";
pub const FINE_GRID: &str = "#f3f4f6";
/// Sizes of text.
pub const SMALL: f64 = 11.0;
pub const NORMAL: f64 = 13.0;
pub const LARGE: f64 = 14.0;

const FONT: &str = "Inter, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

/// Which end of a text its position is.
#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// How a text is set: its size, its colour and which end of it is given.
pub type TextStyle = (f64, &'static str, Anchor);

/// A picture being written.
pub struct Svg(String);

impl Svg {
    /// A white page with a title, and a line below it that says what is shown.
    pub fn new([width, height]: [f64; 2], left: f64, title: &str, subtitle: &str) -> Self {
        let mut svg = Self(String::with_capacity(64 * 1024));
        let escaped = escape(title);
        let _ = write!(
            svg.0,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="{FONT}">
<title>{escaped}</title>
<rect width="{width}" height="{height}" rx="10" fill="{PAGE}"/>
<text x="{left}" y="36" font-size="19" font-weight="600" fill="{INK}">{escaped}</text>
"#
        );
        if !subtitle.is_empty() {
            svg.text([left, 57.0], subtitle, (NORMAL, PALE, Anchor::Start));
        }
        svg
    }

    /// A text.
    pub fn text(&mut self, [x, y]: [f64; 2], text: &str, (size, colour, anchor): TextStyle) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => r#" text-anchor="middle""#,
            Anchor::End => r#" text-anchor="end""#,
        };
        let text = escape(text);
        let _ = writeln!(
            self.0,
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" fill="{colour}"{anchor}>{text}</text>"#
        );
    }

    /// A text that runs upwards, such as the name of a y axis.
    pub fn upward_text(&mut self, [x, y]: [f64; 2], text: &str) {
        let text = escape(text);
        let _ = writeln!(
            self.0,
            r#"<text transform="translate({x} {y}) rotate(-90)" text-anchor="middle" font-size="{LARGE}" fill="{LABEL}">{text}</text>"#
        );
    }

    /// A straight line.
    pub fn line(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], stroke: &str) {
        let _ = writeln!(self.0, r#"<line x1="{x1:.1}" x2="{x2:.1}" y1="{y1:.1}" y2="{y2:.1}" {stroke}/>"#);
    }

    /// A line through points; nothing without a point.
    pub fn path(&mut self, points: impl IntoIterator<Item = [f64; 2]>, stroke: &str) {
        let mut d = String::new();
        for [x, y] in points {
            let _ = write!(d, "{}{x:.1} {y:.1}", if d.is_empty() { 'M' } else { 'L' });
        }
        if !d.is_empty() {
            let _ = writeln!(
                self.0,
                r#"<path fill="none" stroke-linejoin="round" stroke-linecap="round" {stroke} d="{d}"/>"#
            );
        }
    }

    /// A filled shape; nothing without a line.
    pub fn shape(&mut self, d: &str, style: &str) {
        if !d.is_empty() {
            let _ = writeln!(self.0, r#"<path d="{d}" {style}/>"#);
        }
    }

    /// A rectangle.
    pub fn rect(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], style: &str) {
        let _ = writeln!(
            self.0,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {style}/>"#
        );
    }

    /// A dot.
    pub fn dot(&mut self, [x, y]: [f64; 2], colour: &str) {
        let _ = writeln!(
            self.0,
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.6" fill="{colour}" stroke="{PAGE}" stroke-width="1.2"/>"#
        );
    }

    /// A small triangle, pointing up or down.
    pub fn triangle(&mut self, [x, y]: [f64; 2], up: bool) {
        let tip = if up { -5.0 } else { 5.0 };
        let _ = writeln!(self.0, r#"<path d="M{x:.1} {y:.1}h6l-3 {tip}z" fill="{LABEL}"/>"#);
    }

    /// The whole text.
    pub fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// Writes under a temporary name and renames, so that a reader never sees a partial file.
pub fn write(path: &Path, svg: &str) -> Result<()> {
    atomic::write_file(path, |sink| sink.put(svg.as_bytes()))
}

/// Text as XML writes it.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
