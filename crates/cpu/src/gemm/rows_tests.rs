//! Products whose rows are apart.

use super::tests::{Case, Layout, check, isas, product};
use super::*;

#[test]
fn bits_of_a_row_do_not_depend_on_the_rows_beside_it() {
    let (team, mut ws) = (Team::new(2), Workspace::new());
    let layouts = (Layout::Rows, Layout::Columns);
    for isa in isas() {
        for (n, k, dots) in [(100, 400), (67, 259), (9, 31), (1, 1), (19, 1601)]
            .into_iter()
            .flat_map(|(n, k)| [(n, k, true), (n, k, false)])
        {
            let mut whole = |m| {
                let case = Case {
                    size: (m, n, k),
                    layouts,
                    beta: Beta::Overwrite,
                    alpha: 1.0,
                    operands: if dots { Operands::F32 } else { Operands::Bf16 },
                };
                let apart = |g: &Gemm<'_>| {
                    let g =
                        if dots { Gemm { ..*g }.rows_apart(true) } else { Gemm { ..*g }.rows_as_many(true) };
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

/// Weights in panels give the bits of the same product with weights as they were, for any number of rows and threads.
#[test]
fn panels_change_no_bit() {
    let mut ws = Workspace::new();
    let value = |i: usize| (i * 7919 % 1013) as f32 / 500.0 - 1.0;
    for isa in isas() {
        for (n, k) in
            [(1, 1), (48, 384), (47, 385), (100, 31), (241, 768), (400, 40), (97, 1537), (200, 3072)]
        {
            let weight: Vec<f32> = (0..n * k).map(value).collect();
            let mut panels = weight.clone();
            // SAFETY: n k floats.
            unsafe { pack_panels(&Team::new(3), &mut ws, isa, (panels.as_mut_ptr(), [n, k])) }.unwrap();
            for row in 0..n {
                let (first, apart) = row_in_panels(isa, [n, k], row);
                let found = (0..k).map(|step| panels[first + step * apart]);
                assert!(found.eq(weight[row * k..][..k].iter().copied()), "{isa:?} n {n} k {k}: row {row}");
            }
            for m in [1, 2, 5, 8, 9, 16, 33] {
                let a: Vec<f32> = (0..m * (k + 2)).map(|i| value(i + 5)).collect();
                for (beta, alpha) in [(Beta::Overwrite, 1.0), (Beta::Accumulate, -0.5)] {
                    let mut run = |threads: usize, weight: &[f32], in_panels: bool| {
                        let mut c: Vec<f32> = (0..m * (n + 1)).map(|i| value(i + 9)).collect();
                        let b = MatRef::row_major(weight.as_ptr(), k).transposed();
                        let out = MatMut { ptr: c.as_mut_ptr(), rs: n + 1 };
                        let g = Gemm::new((m, n, k), MatRef::row_major(a.as_ptr(), k + 2), b, out);
                        let g = g.beta(beta).alpha(alpha).operands(Operands::Bf16);
                        let g = if in_panels { g.panels() } else { g.rows_as_many(true) };
                        // SAFETY: the matrices have these sizes and strides.
                        unsafe { gemm(&Team::new(threads), &mut ws, isa, &g) }.unwrap();
                        c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let want = run(1, &weight, false);
                    for threads in [1, 2, 3] {
                        let what = format!("{isa:?} m {m} n {n} k {k}, {beta:?}, {threads} threads");
                        assert_eq!(run(threads, &panels, true), want, "{what}");
                    }
                }
            }
            // SAFETY: n k floats that were packed.
            unsafe { unpack_panels(&Team::new(2), &mut ws, isa, (panels.as_mut_ptr(), [n, k])) }.unwrap();
            assert_eq!(panels, weight, "{isa:?} n {n} k {k}");
        }
    }
}
