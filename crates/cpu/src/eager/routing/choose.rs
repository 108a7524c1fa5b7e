//! Which experts a token goes to, and with which weights.

use super::{Sizes, Unfit, below, length};
use crate::isa::Isa;
use crate::kernel::routing::{self as kernel, Made};

/// What a router decides.
#[derive(Debug)]
pub struct RoutedMut<'a> {
    /// (N, E): softmax of the logits
    pub probs: &'a mut [f32],
    /// (N, K): probabilities of the chosen, over their sum
    pub weights: &'a mut [f32],
    /// (N, K): the largest logits, descending, of equal ones the lower number first
    pub experts: &'a mut [i32],
}

/// What a router has decided, to read.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// As in [`RoutedMut`].
    pub probs: &'a [f32],
    /// As in [`RoutedMut`].
    pub weights: &'a [f32],
    /// As in [`RoutedMut`].
    pub experts: &'a [i32],
}

/// Chooses the experts of each token.
///
/// # Errors
/// An array has the wrong size; a logit is NaN or infinite.
pub fn choose(logits: &[f32], to: &mut RoutedMut<'_>, sizes: Sizes) -> Result<(), Unfit> {
    sizes.check()?;
    length("logits", logits.len(), sizes.all())?;
    length("probs", to.probs.len(), sizes.all())?;
    length("weights", to.weights.len(), sizes.routes())?;
    length("experts", to.experts.len(), sizes.routes())?;
    let (isa, all, k) = (Isa::detect(), sizes.experts, sizes.chosen);
    let chosen = to.weights.chunks_exact_mut(k).zip(to.experts.chunks_exact_mut(k));
    let rows = logits.chunks_exact(all).zip(to.probs.chunks_exact_mut(all)).zip(chosen);
    for (token, ((x, p), (w, e))) in rows.enumerate() {
        if !kernel::choose(isa, x, p, w, e) {
            let value = x.iter().find(|x| !x.is_finite()).copied().unwrap_or(f32::NAN);
            return Err(Unfit::Logit(token, value));
        }
    }
    Ok(())
}

/// The gradient of the logits: through the weights, and through `scale·Σ_e load_e·Σ_n probs_ne`, the balancing loss.
///
/// `weights` are the softmax of the chosen logits alone: `weights_j·(d_weights_j - Σ weights·d_weights)`.
///
/// # Errors
/// An array has the wrong size; an expert is out of range.
pub fn choose_bwd(
    d_logits: &mut [f32],
    d_weights: &[f32],
    from: Routed<'_>,
    (load, scale): (&[f32], f32),
    sizes: Sizes,
) -> Result<(), Unfit> {
    sizes.check()?;
    length("d_logits", d_logits.len(), sizes.all())?;
    length("probs", from.probs.len(), sizes.all())?;
    length("load", load.len(), sizes.experts)?;
    length("d_weights", d_weights.len(), sizes.routes())?;
    length("weights", from.weights.len(), sizes.routes())?;
    length("experts", from.experts.len(), sizes.routes())?;
    below("experts", from.experts, sizes.experts)?;
    let (isa, all, k) = (Isa::detect(), sizes.experts, sizes.chosen);
    let rows = d_logits.chunks_exact_mut(all).zip(from.probs.chunks_exact(all));
    for (token, (d, p)) in rows.enumerate() {
        let routes = token * k..(token + 1) * k;
        let made =
            Made { probs: p, weights: &from.weights[routes.clone()], experts: &from.experts[routes.clone()] };
        kernel::choose_bwd(isa, d, &d_weights[routes], made, (load, scale));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { tokens: 3, experts: 4, chosen: 2 };

    #[test]
    fn the_largest_logits_are_chosen_and_of_equal_ones_the_lower() {
        let logits = [0.0, 2.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0, 5.0, 0.0, 9.0, 1.0];
        let (mut probs, mut weights, mut experts) = ([0.0; 12], [0.0; 6], [0; 6]);
        let mut choice = RoutedMut { probs: &mut probs, weights: &mut weights, experts: &mut experts };
        choose(&logits, &mut choice, SIZES).unwrap();
        assert_eq!(experts, [1, 3, 0, 1, 2, 0]);
        assert!((probs[..4].iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(weights[..4], [0.5; 4]);
        assert!((weights[4] - 1.0 / (1.0 + (-4.0_f32).exp())).abs() < 1e-6);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (mut probs, mut weights, mut experts) = ([0.0; 12], [0.0; 6], [0; 6]);
        let mut logits = [0.0; 12];
        logits[7] = f32::NAN;
        let mut choice = RoutedMut { probs: &mut probs, weights: &mut weights, experts: &mut experts };
        let error = choose(&logits, &mut choice, SIZES).unwrap_err();
        assert_eq!(error.to_string(), "a logit of token 1 is NaN, expected a finite number");
        let sizes = Sizes { chosen: 5, ..SIZES };
        let error = choose(&logits, &mut choice, sizes).unwrap_err();
        assert_eq!(error.to_string(), "top_k is 5, expected 1 to 4, the number of experts");
    }
}
