//! The SVG pictures of runs and profiles.

mod curves;
mod heatmap;
pub use curves::*;
pub use heatmap::*;
