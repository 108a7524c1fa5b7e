//! Cases of products of batches of matrices.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::Matmul;

/// (n, M, N, K)
const SHAPES: [[usize; 4]; 10] = [
    [1, 1, 1, 1],
    [2, 31, 33, 5],
    [3, 33, 31, 1],
    [1, 129, 65, 37],
    [5, 1, 48, 80],
    [2, 64, 1, 64],
    [0, 16, 16, 16],
    [2, 24, 40, 0],
    [3, 48, 48, 192],
    [2, 128, 256, 128],
];

/// Sizes of real models.
const LARGE: [[usize; 4]; 2] = [[2, 384, 384, 384], [1, 128, 768, 512]];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES.into_iter().chain(LARGE) {
        for transposed in [[false, false], [false, true], [true, false]] {
            for adds in [false, true] {
                cases.push(matmul(p, shape, transposed, adds));
            }
        }
    }
    for n in [1, 31, 64] {
        cases.extend([gram(p, n, false), gram(p, n, true)]);
    }
    cases
}

fn matmul(p: Precision, shape: [usize; 4], transposed: [bool; 2], adds: bool) -> Case {
    let [n, m, cols, k] = shape;
    let mut kit = Kit::with_precision(p, format!("{shape:?}, transposed {transposed:?}, add {adds}"));
    kit.large = n * m * cols * k > 10_000_000;
    let out = kit.slot([n, m, cols]);
    let a = kit.slot(if transposed[0] { [n, k, m] } else { [n, m, k] });
    let b = kit.slot(if transposed[1] { [n, cols, k] } else { [n, k, cols] });
    let add = adds.then(|| kit.slot([n, m, cols]));
    let (alpha, beta) = if adds { (2.0315, -4.775) } else { (1.0, 0.0) };
    kit.finish(Matmul { out, a, b, add, transposed, alpha, beta })
}

/// A matrix times its own transpose, and the square of a matrix that is added to it: slots that are read twice.
fn gram(p: Precision, n: usize, square: bool) -> Case {
    let mut kit = Kit::with_precision(p, format!("{n}, of itself, square {square}"));
    let (out, a) = (kit.slot([2, n, n]), kit.slot([2, n, n]));
    let op = Matmul { out, a, b: a, add: None, transposed: [false, true], alpha: 1.0, beta: 0.0 };
    if !square {
        return kit.finish(op);
    }
    kit.finish(Matmul { add: Some(a), transposed: [false; 2], alpha: 2.0315, beta: -4.775, ..op })
}
