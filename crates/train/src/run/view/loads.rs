//! The loads of experts over the steps: means of spans of equal length, as few as a picture shows.

use crate::session::LayerRouting;

/// The most spans: a picture is some hundred columns wide.
pub const MOST_SPANS: u64 = 256;
/// A share of 1. Shares are summed as whole numbers, so that no order of reading changes a sum.
const WHOLE: f64 = (1_u64 << 40) as f64;

/// Readings of the routers, summed over spans of `width` steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loads {
    /// Steps of a span, a power of two: the least for which there are at most `MOST_SPANS`.
    pub width: u64,
    spans: Vec<Span>,
}

/// Steps from `number * width` on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Span {
    number: u64,
    readings: u64,
    /// By layer and expert.
    sums: Vec<Vec<u64>>,
}

impl Default for Loads {
    fn default() -> Self {
        Self { width: 1, spans: Vec::new() }
    }
}

impl Loads {
    /// Adds a reading; readings come in the order of their steps.
    pub fn push(&mut self, step: u64, router: &[LayerRouting]) {
        let shares = router.iter().map(|layer| {
            let sum: f64 = layer.load.iter().map(|&load| f64::from(load)).sum();
            let share = |load: f32| (f64::from(load) / sum * WHOLE).round() as u64; // NaN and what is negative become 0
            layer.load.iter().map(|&load| share(load)).collect()
        });
        let span = Span { number: step / self.width, readings: 1, sums: shares.collect() };
        self.add(span);
        self.widen();
    }

    /// Adds the readings of later steps.
    pub fn append(&mut self, mut other: Self) {
        while other.width < self.width {
            other.double();
        }
        while self.width < other.width {
            self.double();
        }
        other.spans.into_iter().for_each(|span| self.add(span));
        self.widen();
    }

    /// Forgets the spans with readings of this step or later ones; with them those before it in the same span.
    pub fn forget_from(&mut self, step: u64) {
        let width = self.width;
        self.spans.retain(|span| (span.number + 1) * width <= step);
    }

    fn widen(&mut self) {
        while let (Some(first), Some(last)) = (self.spans.first(), self.spans.last())
            && last.number - first.number >= MOST_SPANS
        {
            self.double();
        }
    }

    fn double(&mut self) {
        self.width *= 2;
        for mut span in std::mem::take(&mut self.spans) {
            span.number /= 2;
            self.add(span);
        }
    }

    /// Adds to the last span, or begins one. One of another shape, from another model, takes its place.
    fn add(&mut self, span: Span) {
        let shape = |span: &Span| span.sums.iter().map(Vec::len).collect::<Vec<_>>();
        match self.spans.last_mut() {
            Some(last) if last.number == span.number && shape(last) == shape(&span) => {
                last.readings += span.readings;
                for (sum, more) in last.sums.iter_mut().flatten().zip(span.sums.iter().flatten()) {
                    *sum += more;
                }
            }
            Some(last) if last.number == span.number => *last = span,
            _ => self.spans.push(span),
        }
    }

    /// The same in at most this many spans.
    pub fn at_most(&self, spans: usize) -> Self {
        let mut fewer = self.clone();
        while fewer.spans.len() > spans.max(1) {
            fewer.double();
        }
        fewer
    }

    /// Whether there is no reading.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// How many layers there are, by the last reading.
    pub fn layers(&self) -> usize {
        self.spans.last().map_or(0, |span| span.sums.len())
    }

    /// The spans of a layer: the first step, and the mean share of each expert. Those of another number of experts than the last are left out.
    pub fn of_layer(&self, layer: usize) -> Vec<(u64, Vec<f32>)> {
        let experts = self.spans.last().and_then(|span| span.sums.get(layer)).map_or(0, Vec::len);
        let spans = self.spans.iter().filter_map(|span| {
            let sums = span.sums.get(layer).filter(|sums| sums.len() == experts)?;
            let mean = |&sum: &u64| (sum as f64 / (span.readings as f64 * WHOLE)) as f32;
            Some((span.number * self.width, sums.iter().map(mean).collect()))
        });
        spans.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(step: u64) -> Vec<LayerRouting> {
        // two experts a token: loads sum to 2; the first layer drifts, the second alternates
        let drift = step as f32 / 1e4;
        let other = if step.is_multiple_of(2) { [1.5, 0.5] } else { [0.5, 1.5] };
        [[1.0 - drift, 1.0 + drift], other]
            .map(|load| LayerRouting { load: load.to_vec(), entropy: 0.5, aux: 0.1 })
            .into()
    }

    fn loads(steps: impl Iterator<Item = u64>) -> Loads {
        let mut loads = Loads::default();
        steps.for_each(|step| loads.push(step, &reading(step)));
        loads
    }

    #[test]
    fn few_steps_are_spans_of_their_own_and_many_are_means() {
        let few = loads((0..100).step_by(10));
        assert_eq!((few.width, few.layers()), (1, 2));
        assert_eq!(few.of_layer(1)[3], (30, vec![0.75, 0.25]));
        let many = loads(0..5000);
        assert_eq!(many.width, 32);
        let drift = many.of_layer(0);
        assert_eq!(drift.len(), 157);
        // the mean of the steps 64 to 95 is the load at 79.5
        assert!(drift[2].0 == 64 && (drift[2].1[1] - (0.5 + 79.5 / 2e4)).abs() < 1e-6, "{:?}", drift[2]);
        assert_eq!(many.of_layer(1)[7], (224, vec![0.5, 0.5]));
        let fewer = many.at_most(64);
        assert_eq!((fewer.width, fewer.of_layer(0).len()), (128, 40));
        assert!(many.of_layer(2).is_empty() && Loads::default().of_layer(0).is_empty());
    }

    #[test]
    fn parts_that_were_read_apart_give_what_the_whole_gives() {
        let whole = loads(0..5000);
        for cuts in [[1, 2], [100, 4999], [300, 700], [2500, 2501]] {
            let mut parts = loads(0..cuts[0]);
            parts.append(loads(cuts[0]..cuts[1]));
            parts.append(loads(cuts[1]..5000));
            assert_eq!(parts, whole, "{cuts:?}");
        }
        // a run whose log begins late has no more spans than another
        assert_eq!(loads(1_000_000..1_000_200).width, 1);
        assert!(loads(1_000_000..1_001_000).of_layer(0).len() <= MOST_SPANS as usize);
    }

    #[test]
    fn steps_that_are_made_again_do_not_count_twice() {
        let mut again = loads(0..5000);
        again.forget_from(1000);
        assert_eq!(again.of_layer(0).last().map(|span| span.0), Some(960)); // 960 to 991: 992 to 1023 has later steps
        (1000..5000).for_each(|step| again.push(step, &reading(step)));
        let (found, whole) = (again.of_layer(0), loads(0..5000).of_layer(0));
        assert_eq!((found.len(), &found[..31], &found[32..]), (whole.len(), &whole[..31], &whole[32..]));
        again.forget_from(0);
        assert!(again.is_empty());
    }

    #[test]
    fn what_is_no_number_is_no_share() {
        let mut loads = Loads::default();
        loads.push(3, &[LayerRouting { load: vec![f32::NAN, 1.0], entropy: 0.0, aux: 0.0 }]);
        assert_eq!(loads.of_layer(0), [(3, vec![0.0, 0.0])]);
        // another number of experts: those of the last reading count
        loads.push(4, &[LayerRouting { load: vec![1.0, 1.0, 2.0], entropy: 0.0, aux: 0.0 }]);
        assert_eq!(loads.of_layer(0), [(4, vec![0.25, 0.25, 0.5])]);
    }
}
