//! The log of a run as a table, row by row: every step, nothing thinned.

use crate::http::Source;
use bytes::Bytes;
use ironhorse_train::run::view::{Column, Quantity, Table};
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::task::{Context, Poll};

/// Rows that are written at a time.
const PIECE: usize = 4096;

/// The rows that are still to be sent. They are copied, so that a slow client is not in the way of others.
pub struct Rows {
    steps: Vec<u64>,
    /// The steps and values of each quantity, from its first value in the range on.
    columns: Vec<Vec<(u64, f32)>>,
    /// How many values of each quantity are sent.
    at: Vec<usize>,
    row: usize,
    has_head: bool,
}

impl Rows {
    /// The steps of a range.
    pub fn new(table: &Table, steps: &RangeInclusive<u64>) -> Self {
        let within = |column: Column<'_>| -> Vec<(u64, f32)> {
            (0..column.len())
                .filter_map(|at| column.get(at))
                .filter(|(step, _)| steps.contains(step))
                .collect()
        };
        let columns: Vec<Vec<(u64, f32)>> =
            Quantity::ALL.into_iter().map(|quantity| within(table.column(quantity))).collect();
        let mut rows: Vec<u64> = table.steps.iter().copied().filter(|step| steps.contains(step)).collect();
        // a validation at the end belongs to a step that was not made
        rows.extend(
            table
                .val
                .last()
                .map(|one| one.0)
                .filter(|last| steps.contains(last) && table.steps.last() < Some(last)),
        );
        Self { steps: rows, at: vec![0; columns.len()], columns, row: 0, has_head: false }
    }

    fn piece(&mut self) -> String {
        let mut text = String::new();
        if !self.has_head {
            self.has_head = true;
            let keys = Quantity::ALL.map(Quantity::key).join(",");
            let _ = writeln!(text, "step,{keys}");
        }
        for &step in self.steps[self.row..].iter().take(PIECE) {
            let _ = write!(text, "{step}");
            for (column, at) in self.columns.iter().zip(&mut self.at) {
                text.push(',');
                if let Some(&(of, value)) = column.get(*at)
                    && of == step
                {
                    *at += 1;
                    let _ = write!(text, "{value}");
                }
            }
            text.push('\n');
        }
        self.row = (self.row + PIECE).min(self.steps.len());
        text
    }
}

impl Source for Rows {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let done = self.has_head && self.row == self.steps.len();
        Poll::Ready((!done).then(|| self.piece().into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_train::run::metrics::Metrics;

    fn text(mut rows: Rows) -> String {
        let mut all = String::new();
        while rows.row < rows.steps.len() || !rows.has_head {
            all += &rows.piece();
        }
        all
    }

    #[test]
    fn every_step_is_a_row_and_what_it_does_not_have_is_empty() {
        let mut table = Table::default();
        for step in 0..10_000 {
            let val_loss = (step % 5000 == 1).then_some(1.5);
            let loss = if step == 2 { f32::NAN } else { 0.1 };
            table.push(Metrics {
                step,
                loss,
                val_loss,
                lr: 1e-3,
                ms: 2.0,
                tokens_per_s: 512.0,
                ..Metrics::default()
            });
        }
        let all = text(Rows::new(&table, &(0..=u64::MAX)));
        let lines: Vec<&str> = all.lines().collect();
        assert_eq!(lines.len(), 1 + 10_000);
        assert_eq!(
            lines[0],
            "step,loss,val_loss,lr,grad_norm,tokens_per_s,ms,busiest_expert,reward_accuracy"
        );
        assert_eq!(lines[1], "0,0.1,,0.001,NaN,512,2,,");
        assert_eq!(lines[2], "1,0.1,1.5,0.001,NaN,512,2,,");
        assert_eq!(lines[3], "2,NaN,,0.001,NaN,512,2,,");
        assert_eq!(lines[5002], "5001,0.1,1.5,0.001,NaN,512,2,,");
        let part = text(Rows::new(&table, &(4999..=5001)));
        assert_eq!(part.lines().skip(1).collect::<Vec<_>>(), &lines[5000..5003]);
        assert_eq!(text(Rows::new(&Table::default(), &(0..=5))).lines().count(), 1);
    }
}
