//! The SVG pictures of runs and profiles, in one style, readable in black and white.
//!
//! ```text
//! svg.rs     page, colours, dashes, text       curves.rs   loss over the steps       bars.rs  time by op or kernel
//! axis.rs    round ticks and their labels      heatmap.rs  load of the experts       thin.rs  fewer points that look the same
//! history.rs the same load over the steps
//! ```

mod axis;
mod bars;
mod curves;
mod heatmap;
mod history;
mod svg;
mod thin;

pub use bars::{Bar, Bars, bars_svg};
pub(crate) use curves::smoothed;
pub use curves::smoothed_over;
pub use curves::{Plot, Series, Style, curves_svg, curves_text, loss_svg};
pub use heatmap::{load_svg, load_text};
pub use history::loads_text;
pub use svg::{COLOURS, DASHES};
pub use thin::thin;
