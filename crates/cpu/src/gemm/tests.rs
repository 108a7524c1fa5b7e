//! Against f64, on awkward sizes, with every set of instructions this machine has.

use super::*;
use crate::buffer::Buffer;
use ironhorse_core::{Operands, bf16_to_f32, f32_to_bf16};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A matrix with its storage: rows contiguous, columns contiguous, or neither.
struct Owned {
    data: Vec<f32>,
    rs: usize,
    cs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    Rows,
    Columns,
    Strided,
}

const LAYOUTS: [Layout; 3] = [Layout::Rows, Layout::Columns, Layout::Strided];

impl Owned {
    fn new(rows: usize, cols: usize, layout: Layout, seed: u64) -> Self {
        let (rs, cs) = match layout {
            Layout::Rows => (cols + 3, 1),
            Layout::Columns => (1, rows + 1),
            Layout::Strided => (2 * cols + 1, 2),
        };
        // NaN everywhere but in the elements, so that a read outside them shows.
        let mut data = vec![f32::NAN; rows * rs.max(1) + cols * cs + 1];
        let values = random(rows * cols, seed);
        for i in 0..rows {
            for j in 0..cols {
                data[i * rs + j * cs] = values[i * cols + j];
            }
        }
        Self { data, rs, cs }
    }

    fn mat(&self) -> MatRef {
        MatRef { ptr: self.data.as_ptr(), rs: self.rs, cs: self.cs }
    }
}

pub(super) struct Case {
    pub(super) size: (usize, usize, usize),
    pub(super) layouts: (Layout, Layout),
    pub(super) beta: Beta,
    pub(super) alpha: f32,
    pub(super) operands: Operands,
}

/// Runs a case and gives c with its row stride: old values 0.25 or NaN, and NaN between the rows.
pub(super) fn product(case: &Case, call: impl FnOnce(&Gemm<'_>)) -> (Vec<f32>, usize) {
    let (m, n, k) = case.size;
    let a = Owned::new(m, k, case.layouts.0, 1);
    let b = Owned::new(k, n, case.layouts.1, 2);
    let rs = n + 5;
    let mut c = vec![f32::NAN; m * rs];
    if case.beta == Beta::Accumulate {
        for i in 0..m {
            c[i * rs..i * rs + n].fill(0.25);
        }
    }
    let out = MatMut { ptr: c.as_mut_ptr(), rs };
    call(
        &Gemm::new(case.size, a.mat(), b.mat(), out)
            .beta(case.beta)
            .alpha(case.alpha)
            .operands(case.operands),
    );
    (c, rs)
}

/// Σ a·b and Σ |a·b| of each element of a product.
type Sums = Arc<Vec<[f64; 2]>>;

/// The sums of a case. Layouts, instructions and old values do not change them, so they are computed once.
fn sums(case: &Case) -> Sums {
    type Key = ((usize, usize, usize), bool);
    static KNOWN: Mutex<BTreeMap<Key, Sums>> = Mutex::new(BTreeMap::new());
    let key = (case.size, case.operands == Operands::Bf16);
    if let Some(known) = KNOWN.lock().unwrap().get(&key) {
        return Arc::clone(known);
    }
    let (m, n, k) = case.size;
    let rounded = |x: f32| if key.1 { bf16_to_f32(f32_to_bf16(x)) } else { x };
    let [a, b] = [(m, k, 1), (k, n, 2)].map(|(rows, cols, seed)| {
        random(rows * cols, seed).into_iter().map(|x| f64::from(rounded(x))).collect::<Vec<f64>>()
    });
    let mut sums = vec![[0.0; 2]; m * n];
    for (i, p) in (0..m).flat_map(|i| (0..k).map(move |p| (i, p))) {
        for (sum, b) in sums[i * n..(i + 1) * n].iter_mut().zip(&b[p * n..(p + 1) * n]) {
            let one = a[i * k + p] * b;
            *sum = [sum[0] + one, sum[1] + one.abs()];
        }
    }
    let sums = Arc::new(sums);
    KNOWN.lock().unwrap().insert(key, Arc::clone(&sums));
    sums
}

pub(super) fn check(case: &Case, what: &str, call: impl FnOnce(&Gemm<'_>)) {
    let (m, n, k) = case.size;
    let (sums, (c, rs)) = (sums(case), product(case, call));
    let old = if case.beta == Beta::Accumulate { 0.25 } else { 0.0 };
    for i in 0..m {
        for j in 0..n {
            let [sum, size] = sums[i * n + j];
            let want = old + f64::from(case.alpha) * sum;
            // A random walk of k roundings, with room.
            let room = 2e-7 * (1.0 + size * f64::from(case.alpha.abs()) * 16.0 / (k.max(1) as f64).sqrt());
            let got = f64::from(c[i * rs + j]);
            assert!(
                (got - want).abs() <= room,
                "{what} {:?} {:?} {:?}: c[{i}, {j}] is {got}, exactly {want}",
                case.size,
                case.layouts,
                case.beta
            );
        }
        assert!(c[i * rs + n..(i + 1) * rs].iter().all(|x| x.is_nan()), "{what}: wrote beyond a row");
    }
}

fn sizes() -> Vec<(usize, usize, usize)> {
    let awkward = [1, 7, 8, 9, 31, 33, 47, 48, 49];
    let mut sizes = Vec::new();
    for (i, &m) in awkward.iter().enumerate() {
        for (j, &n) in awkward.iter().enumerate() {
            sizes.push((m, n, awkward[(i + 2 * j) % awkward.len()]));
        }
    }
    sizes.extend([(3, 5, 0), (0, 4, 4), (4, 0, 4), (5, 1009, 3), (1009, 5, 3), (1, 1009, 385), (4, 97, 769)]);
    sizes.extend([
        (64, 64, 64),
        (17, 100, 1000),
        (130, 50, 777),
        (2, 3, 4000),
        (300, 40, 100),
        (150, 40, 390),
    ]);
    sizes
}

pub(super) fn isas() -> impl Iterator<Item = Isa> {
    Isa::supported()
}

/// The product by packed panels, which [`gemm`] takes only where b is large.
///
/// # Safety
/// As [`gemm`].
unsafe fn planned(team: &Team, ws: &mut Workspace, isa: Isa, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    if g.m * g.n * g.k == 0 {
        // SAFETY: guaranteed by the caller.
        return unsafe { gemm(team, ws, isa, g) };
    }
    // SAFETY: guaranteed by the caller; m, n and k are not zero.
    unsafe { plan::Plan::new(g, kernels(isa), team.threads()).run(team, ws) }
}

#[test]
fn agrees_with_f64() {
    let team = Team::new(2);
    let mut ws = Workspace::new();
    for isa in isas() {
        for size in sizes() {
            for a in LAYOUTS {
                for b in LAYOUTS {
                    for (beta, alpha) in [(Beta::Overwrite, 1.0), (Beta::Accumulate, -0.5)] {
                        ws.poison();
                        let case = Case { size, layouts: (a, b), beta, alpha, operands: Operands::F32 };
                        // SAFETY: the matrices of `product` have these sizes and strides.
                        check(&case, isa.name(), |g| unsafe { gemm(&team, &mut ws, isa, g) }.unwrap());
                        ws.poison();
                        // SAFETY: as above.
                        check(&case, isa.name(), |g| unsafe { planned(&team, &mut ws, isa, g) }.unwrap());
                    }
                }
            }
        }
    }
}

/// With and without the unit that multiplies them: exact products of rounded operands, and the bits of one thread.
#[test]
fn rounded_operands_agree_with_f64() {
    let (team, one) = (Team::new(3), Team::new(1));
    let mut ws = Workspace::new();
    let sizes = [
        (32, 32, 32),
        (33, 47, 65),
        (64, 100, 1000),
        (257, 97, 400),
        (40, 333, 96),
        (31, 64, 64),
        (33, 65, 18_049),
    ];
    for isa in isas() {
        for size in sizes {
            for layouts in LAYOUTS.into_iter().flat_map(|a| LAYOUTS.map(|b| (a, b))) {
                for beta in [Beta::Overwrite, Beta::Accumulate] {
                    // one with few rows is computed as if nothing had been asked for
                    let few = size.0 < LEAST_ROUNDED;
                    let operands = if few { Operands::F32 } else { Operands::Bf16 };
                    let case = Case { size, layouts, beta, alpha: 1.0, operands };
                    ws.poison();
                    check(&case, isa.name(), |g| {
                        // SAFETY: the matrices of `product` have these sizes and strides.
                        unsafe { gemm(&team, &mut ws, isa, &g.operands(Operands::Bf16)) }.unwrap();
                    });
                    // SAFETY: as above.
                    let (c, _) = product(&case, |g| unsafe { gemm(&team, &mut ws, isa, g) }.unwrap());
                    // SAFETY: as above.
                    let (again, _) = product(&case, |g| unsafe { gemm(&one, &mut ws, isa, g) }.unwrap());
                    let same = c.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{isa:?} {size:?} {layouts:?}: bits depend on threads");
                }
            }
        }
    }
}

#[test]
fn local_agrees_with_f64() {
    let mut scratch = LocalScratch::new();
    for isa in isas() {
        for size in sizes() {
            for a in LAYOUTS {
                for b in LAYOUTS {
                    for (beta, alpha) in [(Beta::Overwrite, 0.125), (Beta::Accumulate, 1.0)] {
                        scratch.packed.as_mut_slice().fill(f32::NAN);
                        scratch.packed_a.as_mut_slice().fill(f32::NAN);
                        let case = Case { size, layouts: (a, b), beta, alpha, operands: Operands::F32 };
                        // SAFETY: the matrices of `product` have these sizes and strides.
                        check(&case, isa.name(), |g| unsafe { gemm_local(&mut scratch, isa, g) });
                    }
                }
            }
        }
    }
}

#[test]
fn vocabulary_sized() {
    let team = Team::new(2);
    let mut ws = Workspace::new();
    for isa in isas() {
        for (size, layouts) in [
            ((9, 50257, 5), (Layout::Rows, Layout::Columns)),
            ((9, 5, 50257), (Layout::Rows, Layout::Rows)),
            ((50257, 9, 5), (Layout::Columns, Layout::Rows)),
        ] {
            for beta in [Beta::Overwrite, Beta::Accumulate] {
                let case = Case { size, layouts, beta, alpha: 1.0, operands: Operands::F32 };
                // SAFETY: the matrices of `product` have these sizes and strides.
                check(&case, isa.name(), |g| unsafe { gemm(&team, &mut ws, isa, g) }.unwrap());
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let teams: Vec<Team> = [1, 2, 3, 4, 7].into_iter().map(Team::new).collect();
    let mut ws = Workspace::new();
    for isa in isas() {
        for size in [
            (3, 200, 500),
            (9, 100, 400),
            (61, 331, 1153),
            (331, 61, 259),
            (257, 97, 3001),
            (8, 48, 20000),
            (300, 40, 500),
            (600, 64, 130),
            (61, 1100, 130),
        ] {
            for layouts in [
                (Layout::Rows, Layout::Columns),
                (Layout::Rows, Layout::Rows),
                (Layout::Columns, Layout::Rows),
            ] {
                let case =
                    Case { size, layouts, beta: Beta::Accumulate, alpha: 1.0, operands: Operands::F32 };
                let to_bits = |c: Vec<f32>| c.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                // SAFETY: the matrices of `product` have these sizes and strides.
                let first = product(&case, |g| unsafe { gemm(&teams[0], &mut ws, isa, g) }.unwrap());
                let first = to_bits(first.0);
                for team in &teams[1..] {
                    // SAFETY: as above.
                    let (c, _) = product(&case, |g| unsafe { gemm(team, &mut ws, isa, g) }.unwrap());
                    assert!(first == to_bits(c), "{isa:?} {size:?} with {} threads", team.threads());
                    if size.0 <= super::gemv::FEW && layouts.1 == Layout::Columns {
                        continue; // of few rows the sum is a tree
                    }
                    // SAFETY: as above.
                    let (c, _) = product(&case, |g| unsafe { planned(team, &mut ws, isa, g) }.unwrap());
                    assert!(first == to_bits(c), "{isa:?} {size:?} by panels, {} threads", team.threads());
                }
            }
        }
    }
}

#[test]
fn sets_with_fma_give_the_same_bits() {
    let team = Team::new(2);
    let mut ws = Workspace::new();
    let (rows, sums) = ((Layout::Rows, Layout::Columns), (Layout::Columns, Layout::Rows));
    for (size, layouts, apart) in [
        ((61, 331, 1153), rows, false),
        ((3, 77, 500), rows, false),
        ((61, 77, 1153), rows, true),
        // sums over many rows of a narrow matrix, whose columns some sets have in one tile
        ((131, 64, 300), sums, false),
        ((49, 200, 259), sums, false),
        ((64, 70, 127), sums, false),
    ] {
        let case = Case { size, layouts, beta: Beta::Overwrite, alpha: 1.0, operands: Operands::F32 };
        let bits: Vec<Vec<u32>> = isas()
            .filter(|&isa| isa != Isa::PORTABLE)
            .map(|isa| {
                // SAFETY: the matrices of `product` have these sizes and strides.
                product(&case, |g| unsafe { gemm(&team, &mut ws, isa, &g.rows_apart(apart)) }.unwrap()).0
            })
            .map(|c| c.into_iter().map(f32::to_bits).collect())
            .collect();
        assert!(bits.windows(2).all(|pair| pair[0] == pair[1]), "{size:?}");
    }
}

/// Some sets compute a result of few columns transposed.
#[test]
fn a_transposed_result_has_the_same_bits() {
    let mut scratch = LocalScratch::new();
    for size in [(61, 13, 500), (64, 16, 256), (33, 1, 31)] {
        for (beta, alpha) in [(Beta::Overwrite, 1.0), (Beta::Accumulate, 0.3)] {
            let layouts = (Layout::Columns, Layout::Rows);
            let case = Case { size, layouts, beta, alpha, operands: Operands::F32 };
            let mut bits = isas().filter(|&isa| isa != Isa::PORTABLE).map(|isa| {
                // SAFETY: the matrices of `product` have these sizes and strides.
                let (c, _) = product(&case, |g| unsafe { gemm_local(&mut scratch, isa, g) });
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            let first = bits.next();
            assert!(bits.all(|bits| Some(&bits) == first.as_ref()), "{size:?} {beta:?}");
        }
    }
}

/// Gradients of large weights are written past the caches where their rows are whole lines: the same bits as in memory where they are not.
#[test]
fn large_sums_over_rows_have_the_same_bits_wherever_they_are() {
    if !multiplies_bf16() {
        let _ = writeln!(
            std::io::stderr(),
            "large_sums_over_rows: stores past the caches NOT TESTED, this machine has no tiles"
        );
    }
    let (m, n, k) = (768, 704, 70);
    let (a, b) = (random(k * m, 1), random(k * n, 2));
    for (isa, operands) in Isa::supported().flat_map(|isa| [Operands::F32, Operands::Bf16].map(|x| (isa, x)))
    {
        let run = |offset: usize, threads: usize| {
            let mut c = Buffer::zeroed(offset + m * n);
            c.as_mut_slice().fill(f32::NAN);
            let [left, right] = [(&a, m), (&b, n)].map(|(x, cols)| MatRef::row_major(x.as_ptr(), cols));
            let out = MatMut { ptr: c.as_mut_slice()[offset..].as_mut_ptr(), rs: n };
            let g = Gemm::new((m, n, k), left.transposed(), right, out).operands(operands);
            // SAFETY: the matrices are as large as said and apart.
            unsafe { gemm(&Team::new(threads), &mut Workspace::new(), isa, &g) }.unwrap();
            c.as_slice()[offset..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let want = run(3, 1);
        assert!(want.iter().all(|&bits| f32::from_bits(bits).is_finite()), "{isa:?}, {operands:?}");
        for threads in [1, 3] {
            assert!(run(0, threads) == want, "{isa:?}, {operands:?}, {threads} threads: other bits");
        }
    }
}

#[test]
fn epilogue_sees_each_final_element_once() {
    for threads in [1, 3] {
        let team = Team::new(threads);
        let mut ws = Workspace::new();
        for isa in isas() {
            for size in [(33, 201, 1000), (201, 33, 1000), (2, 200, 64), (40, 300, 20000), (5, 6, 0)] {
                let (m, n, _) = size;
                let hits: Vec<AtomicU32> = (0..m * n).map(|_| AtomicU32::new(0)).collect();
                let case = Case {
                    size,
                    layouts: (Layout::Rows, Layout::Columns),
                    beta: Beta::Overwrite,
                    alpha: 1.0,
                    operands: Operands::F32,
                };
                // SAFETY: the matrices of `product` have these sizes and strides.
                let (plain, rs) = product(&case, |g| unsafe { gemm(&team, &mut ws, isa, g) }.unwrap());
                let (c, _) = product(&case, |g| {
                    let out = g.c.ptr as usize;
                    let negate = |rows: Range<usize>, columns: Range<usize>, worker: usize| {
                        assert!(worker < threads);
                        for i in rows {
                            for j in columns.clone() {
                                hits[i * n + j].fetch_add(1, Ordering::Relaxed);
                                // SAFETY: an element of the region given.
                                unsafe { *(out as *mut f32).add(i * rs + j) *= -1.0 };
                            }
                        }
                    };
                    // SAFETY: the matrices of `product` have these sizes and strides.
                    unsafe { gemm(&team, &mut ws, isa, &g.epilogue(&negate)) }.unwrap();
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1), "{isa:?} {size:?}");
                for i in 0..m {
                    for j in 0..n {
                        assert_eq!(c[i * rs + j], -plain[i * rs + j], "{isa:?} {size:?}");
                    }
                }
            }
        }
    }
}
