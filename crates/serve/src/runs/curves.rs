//! Parts of curves, thinned to what a screen shows.

use super::number;
use super::shelf::Shelf;
use crate::error::{ApiError, quoted};
use crate::http::{Request, Response, answer as answered};
use hyper::StatusCode;
use ironhorse_train::run::view::{Drawn, Quantity, Table};
use serde::Serialize;
use std::ops::RangeInclusive;

/// The most columns that are worth asking for.
const MOST_COLUMNS: u64 = 4096;

/// What a request asks for.
#[derive(Debug)]
pub struct Asked {
    quantities: Vec<Quantity>,
    drawn: Drawn,
}

/// The steps from `from` to `to`; all without them.
pub fn steps(request: &Request) -> Result<RangeInclusive<u64>, ApiError> {
    Ok(number(request, "from")?.unwrap_or(0)..=number(request, "to")?.unwrap_or(u64::MAX))
}

impl Asked {
    /// What the query says.
    pub fn read(request: &Request) -> Result<Self, ApiError> {
        let mut quantities = Vec::new();
        for key in request.values("quantity") {
            let Some(found) = Quantity::ALL.into_iter().find(|one| one.key() == key) else {
                let (key, all) = (quoted(&key), Quantity::ALL.map(Quantity::key).join(", "));
                return Err(ApiError::param("quantity", format!("quantity is {key}, expected one of {all}")));
            };
            if !quantities.contains(&found) {
                quantities.push(found);
            }
        }
        if quantities.is_empty() {
            quantities = Quantity::ALL.to_vec();
        }
        let columns = number(request, "columns")?.unwrap_or(800).clamp(1, MOST_COLUMNS) as usize;
        let share = usize::try_from(number(request, "smooth")?.unwrap_or(0)).unwrap_or(usize::MAX);
        let log_across = request.values("across").any(|across| across == "log");
        Ok(Self { quantities, drawn: Drawn { steps: steps(request)?, share, columns, log_across } })
    }
}

/// A curve: what was measured, and its mean where that is asked for and is another.
#[derive(Serialize)]
struct Curve<'a> {
    run: &'a str,
    quantity: &'static str,
    x: Vec<u64>,
    y: Vec<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    smooth_x: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    smooth_y: Vec<f32>,
}

#[derive(Serialize)]
struct Curves<'a> {
    curves: Vec<Curve<'a>>,
}

/// The curves of these runs.
pub fn answer(shelf: &Shelf, names: &[String], asked: &Asked) -> Result<Response, ApiError> {
    let mut curves = Vec::new();
    for name in names {
        let held = shelf.open(name)?;
        let run = held.lock();
        for &quantity in &asked.quantities {
            curves.extend(curve(&run.view.table, name, quantity, &asked.drawn));
        }
    }
    let text = serde_json::to_string(&Curves { curves })
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, None, error.to_string()))?;
    Ok(answered(StatusCode::OK, "application/json", text))
}

fn curve<'a>(table: &Table, run: &'a str, quantity: Quantity, drawn: &Drawn) -> Option<Curve<'a>> {
    let split = |points: Vec<(f64, f64)>| -> (Vec<u64>, Vec<f32>) {
        points.into_iter().map(|(x, y)| (x as u64, y as f32)).unzip()
    };
    let (x, y) = split(table.curve(quantity, &Drawn { share: 0, ..drawn.clone() }));
    let smooths = drawn.share > 0 && quantity.is_noisy();
    let smooth = if smooths { table.curve(quantity, drawn) } else { Vec::new() };
    let (smooth_x, smooth_y) = split(smooth);
    (!x.is_empty()).then(|| Curve { run, quantity: quantity.key(), x, y, smooth_x, smooth_y })
}
