//! Products whose rows are apart.

use super::tests::{Case, Layout, check, isas, product};
use super::*;

#[test]
fn bits_of_a_row_do_not_depend_on_the_rows_beside_it() {
    let (team, mut ws) = (Team::new(2), Workspace::new());
    let layouts = (Layout::Rows, Layout::Columns);
    for isa in isas() {
        for (n, k) in [(100, 400), (67, 259), (9, 31), (1, 1), (19, 1601)] {
            let mut whole = |m| {
                let case = Case {
                    size: (m, n, k),
                    layouts,
                    beta: Beta::Overwrite,
                    alpha: 1.0,
                    operands: Operands::F32,
                };
                let apart = |g: &Gemm<'_>| {
                    let g = Gemm { ..*g }.rows_apart(true);
                    // SAFETY: the matrices of `product` have these sizes and strides.
                    unsafe { gemm(&team, &mut ws, isa, &g) }.unwrap();
                };
                let c = product(&case, apart).0;
                c.chunks(c.len() / m)
                    .map(|row| row[..n].iter().map(|x| x.to_bits()).collect())
                    .collect::<Vec<Vec<_>>>()
            };
            let one = whole(1);
            for m in [2, 3, 4, 5, 7, 8, 16, 33, 64, 65, 130] {
                assert_eq!(whole(m)[0], one[0], "{isa:?} n {n} k {k}: the first of {m} rows");
                assert_eq!(whole(m)[..m - 1], whole(m - 1)[..], "{isa:?} n {n} k {k}: {m} rows and one less");
            }
        }
    }
}

/// Any number of rows, slices of k that are whole and not, strides of all three matrices.
#[test]
fn rows_apart_agree_with_f64() {
    let (team, mut ws) = (Team::new(2), Workspace::new());
    for isa in isas() {
        for size in
            [(1, 9, 1), (2, 17, 33), (5, 70, 767), (6, 8, 768), (7, 9, 769), (13, 25, 1537), (130, 3, 40)]
        {
            for (beta, alpha) in [(Beta::Overwrite, 1.0), (Beta::Accumulate, -0.5)] {
                let layouts = (Layout::Rows, Layout::Columns);
                let case = Case { size, layouts, beta, alpha, operands: Operands::F32 };
                check(&case, isa.name(), |g| {
                    let g = Gemm { ..*g }.rows_apart(true);
                    // SAFETY: the matrices of `product` have these sizes and strides.
                    unsafe { gemm(&team, &mut ws, isa, &g) }.unwrap();
                });
            }
        }
    }
}
