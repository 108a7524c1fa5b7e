//! Watches how tokens spread over experts, and says when a layer leaves one idle or floods one.

use crate::session::LayerRouting;

/// Readings that are averaged: a single batch is noise.
const WINDOW: u32 = 50;
/// The fewest readings at the end of a run from which a warning may follow.
const LEAST: u32 = 10;
/// A load below the first or above the second multiple of the even share K/E is out of balance.
const IDLE: f64 = 0.1;
const FLOODED: f64 = 3.0;

/// Sums of the loads since the last check.
#[derive(Debug, Default)]
pub(super) struct Balance {
    sums: Vec<Vec<f64>>,
    readings: u32,
    /// Layers with a warning already: each gets one.
    warned: Vec<bool>,
}

impl Balance {
    /// Adds a reading, which is empty if none was made. Returns a warning if a layer has gone out of balance.
    pub fn add(&mut self, routing: &[LayerRouting], last: bool) -> Option<String> {
        if !routing.is_empty() {
            self.sums.resize(routing.len(), Vec::new());
            self.warned.resize(routing.len(), false);
            for (sums, layer) in self.sums.iter_mut().zip(routing) {
                sums.resize(layer.load.len(), 0.0);
                sums.iter_mut().zip(&layer.load).for_each(|(sum, &load)| *sum += f64::from(load));
            }
            self.readings += 1;
        }
        let enough = self.readings >= WINDOW || (last && self.readings >= LEAST);
        if !enough {
            return None;
        }
        let warning = self.look();
        (self.sums, self.readings) = (Vec::new(), 0);
        warning
    }

    /// The worst expert of the layers not yet warned about, if it is bad enough.
    fn look(&mut self) -> Option<String> {
        let mut worst: Option<(f64, usize, usize, f64, f64)> = None;
        let mut wrong = 0;
        let layers = self.sums.iter().zip(&mut self.warned).enumerate();
        for (l, (sums, warned)) in layers.filter(|(_, (_, warned))| !**warned) {
            let even = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
            let off = |sum: f64| (even * IDLE / sum).max(sum / (even * FLOODED)); // above 1: out of balance
            let at = (0..sums.len()).max_by(|&a, &b| off(sums[a]).total_cmp(&off(sums[b])));
            let Some((e, badness)) = at.map(|e| (e, off(sums[e]))).filter(|(_, badness)| *badness > 1.0)
            else {
                continue;
            };
            wrong += 1;
            if worst.is_none_or(|(most, ..)| badness > most) {
                let share = |sum: f64| 100.0 * sum / f64::from(self.readings);
                worst = Some((badness, l, e, share(sums[e]), share(even)));
            }
            *warned = true;
        }
        let (_, l, e, share, even) = worst?;
        let more = match wrong {
            1 => String::new(),
            2 => "; so is one other layer".into(),
            _ => format!("; so are {} other layers", wrong - 1),
        };
        Some(format!(
            "layer {l} is out of balance: expert {e} gets {share:.1} % of the tokens, an even share is {even:.1} %{more}; \
             raise aux_alpha if the loss suffers"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(load: &[f32]) -> LayerRouting {
        LayerRouting { load: load.to_vec(), entropy: 1.0, aux: 0.02 }
    }

    fn warnings(readings: &[LayerRouting], count: u32) -> Vec<String> {
        let mut balance = Balance::default();
        (1..=count).filter_map(|i| balance.add(readings, i == count)).collect()
    }

    #[test]
    fn an_idle_expert_is_named_once() {
        let layers = [layer(&[0.5, 0.5, 0.5, 0.5]), layer(&[0.98, 0.5, 0.02, 0.5])];
        let said = warnings(&layers, 200);
        assert_eq!(said.len(), 1);
        assert!(
            said[0].starts_with(
                "layer 1 is out of balance: expert 2 gets 2.0 % of the tokens, an even share is 50.0 %;"
            ),
            "{said:?}"
        );
        assert_eq!(warnings(&layers, 9), Vec::<String>::new(), "too few to tell");
        assert_eq!(warnings(&layers, 10).len(), 1, "the end of a short run");
    }

    #[test]
    fn a_flooded_expert_is_named_and_an_even_load_is_not() {
        let said = warnings(&[layer(&[0.9, 0.02, 0.02, 0.02, 0.04]), layer(&[1.0, 0.0, 0.0, 0.0, 0.0])], 50);
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("expert") && said[0].contains("so is one other layer"), "{said:?}");
        assert_eq!(warnings(&[layer(&[0.3, 0.2, 0.2, 0.15, 0.15])], 500), Vec::<String>::new());
        assert_eq!(warnings(&[], 500), Vec::<String>::new());
    }
}
