//! What a report draws: the curves of both runs in one frame, and the experts of each.

use ironhorse::train::Result;
use ironhorse::train::picture::{Plot, Series, Style, curves_text, load_text, loads_text};
use ironhorse::train::run::view::{Quantity, RunView};

/// From this many tokens per second on they are counted in thousands.
const MANY: f64 = 10_000.0;

/// The pictures as SVG.
pub fn all(views: &[RunView]) -> Result<Vec<String>> {
    let mut pictures = Vec::new();
    let losses =
        [(Quantity::Loss, "training", Style::Smoothed), (Quantity::ValLoss, "validation", Style::Dots)];
    pictures.extend(drawn(views, "loss", "loss (nats per token)", &losses)?);
    for (quantity, style) in [
        (Quantity::Lr, Style::Line),
        (Quantity::GradNorm, Style::Smoothed),
        (Quantity::TokensPerS, Style::Smoothed),
        (Quantity::RewardAccuracy, Style::Smoothed),
        (Quantity::Busiest, Style::Smoothed),
    ] {
        let all = views.iter().flat_map(|view| view.table.points(quantity));
        let many = quantity == Quantity::TokensPerS && all.map(|point| point.1).fold(0.0, f64::max) >= MANY;
        let upward = if many { "speed (1000 tokens/s)".to_owned() } else { quantity.label() };
        pictures.extend(drawn(views, quantity.name(), &upward, &[(quantity, "", style)])?);
    }
    for view in views.iter().filter(|view| !view.table.router.is_empty()) {
        let load =
            view.table.router.iter().map(|layer| layer.load.iter().map(|&load| f64::from(load)).collect());
        pictures.push(load_text(&load.collect::<Vec<_>>()));
        pictures.extend(loads_text(&view.table.loads));
    }
    Ok(pictures)
}

/// Quantities of every run over the steps; `None` where no run has them.
fn drawn(
    views: &[RunView],
    title: &str,
    upward: &str,
    quantities: &[(Quantity, &str, Style)],
) -> Result<Option<String>> {
    let mut series = Vec::new();
    for view in views {
        for &(quantity, name, style) in quantities {
            let mut points = view.table.points(quantity);
            if points.is_empty() {
                continue;
            }
            if upward.contains("1000") {
                points.iter_mut().for_each(|point| point.1 /= 1e3);
            }
            let name = match (views.len(), name) {
                (1, "") => title.to_owned(),
                (1, name) => name.to_owned(),
                (_, name) => format!("{} {name}", view.name()).trim().to_owned(),
            };
            series.push(Series { name, points, style });
        }
    }
    if series.is_empty() {
        return Ok(None);
    }
    curves_text(Plot { title, across: "step", upward }, &series).map(Some)
}
