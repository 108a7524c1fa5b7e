//! What a product is, in the library's column-major terms, and everything that decides which algorithm is best for it.
//!
//! A row-major (r,c) tensor is the column-major c by r matrix of the same bytes. So no tensor is ever transposed in memory:
//!
//! | product | D (m by n) | A | B | k |
//! | --- | --- | --- | --- | --- |
//! | out = inp · weightᵀ | OC by rows | weight, transposed | inp | C |
//! | d_inp = d_out · weight | C by rows | weight | d_out | OC |
//! | d_weight = d_outᵀ · inp | C by OC | inp | d_out, transposed | rows |

use crate::cublaslt::{Description, Epilogue, Matrix};
use ironhorse_core::DType;
use std::fmt;

/// What happens to the result besides the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Extra {
    /// Nothing happens besides the product.
    None,
    /// A bias per row of D is added.
    Bias,
    /// D becomes gelu of the result; the result itself goes to the side.
    Gelu { bias: bool },
    /// The result is multiplied by the GELU's derivative at a matrix on the side.
    GeluGrad,
    /// The sums of B over k go to the side: a bias gradient.
    BiasGrad,
}

impl Extra {
    /// `CUBLASLT_EPILOGUE_*`.
    fn code(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias => 4,
            Self::Gelu { bias: false } => 32 | 128,
            Self::Gelu { bias: true } => 32 | 128 | 4,
            Self::GeluGrad => 64 | 128,
            Self::BiasGrad => 512,
        }
    }

    /// What the product still does if a part of this is left to a kernel of its own; `None` if nothing can be left to one.
    pub fn plainer(self) -> Option<Self> {
        match self {
            Self::None | Self::Bias => None,
            Self::Gelu { bias: true } => Some(Self::Bias),
            Self::Gelu { bias: false } | Self::GeluGrad | Self::BiasGrad => Some(Self::None),
        }
    }
}

/// Everything that decides which algorithm is best, the device and the library aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Problem {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Whether A and B are transposed.
    pub transposed: [bool; 2],
    /// Element type of A and B.
    pub inputs: DType,
    /// Element type of B where it is another one, as of 8-bit numbers.
    pub inputs_b: Option<DType>,
    /// Element type of D, of the bias and of the matrix on the side.
    pub output: DType,
    pub tf32: bool,
    /// Whether sums of 8-bit products may keep fewer bits.
    pub fast_sums: bool,
    pub extra: Extra,
    /// Whether D is added to, or another matrix of its size in its place ([`Addresses::c`]).
    pub adds: bool,
    /// How many such products, of matrices one after the other.
    pub batch: usize,
    /// What the addresses of A, B, D and the side memory are multiples of; at most [`ALIGN`].
    pub align: [u32; 4],
    /// Elements from one column of A, B and D to the next, as they are stored: more than its rows where a matrix is a
    /// part of a wider one. Of a batch there are no wider ones.
    pub ld: [usize; 3],
}

/// What every slot starts at a multiple of. Better alignment by chance must not lead to another choice.
pub(crate) const ALIGN: u32 = 64;

/// Addresses of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    /// The bias or its gradient, or 0.
    pub bias: u64,
    /// The value before GELU, or 0.
    pub aux: u64,
    /// What is added to the product, or 0 for D itself.
    pub c: u64,
    /// The factors of A and B where these are 8-bit numbers, or 0.
    pub scales: [u64; 2],
}

impl Addresses {
    /// What these addresses are multiples of.
    fn align(&self) -> [u32; 4] {
        [self.a, self.b, self.d | self.c, self.bias | self.aux].map(|address| {
            let zeros = address.trailing_zeros().min(ALIGN.trailing_zeros());
            1 << zeros
        })
    }
}

/// The sizes and types of a linear layer's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub rows: usize,
    /// Columns of the layer's input.
    pub ic: usize,
    /// Columns of the layer's output.
    pub oc: usize,
    /// Type of the two matrices multiplied.
    pub inputs: DType,
    /// Type of the result.
    pub output: DType,
    pub tf32: bool,
}

impl Problem {
    fn new(sizes: &Sizes, [m, n, k]: [usize; 3], transposed: [bool; 2], at: &Addresses) -> Self {
        let Sizes { inputs, output, tf32, .. } = *sizes;
        let tf32 = tf32 && inputs == DType::F32;
        let (extra, align) = (Extra::None, at.align());
        let ld = [if transposed[0] { k } else { m }, if transposed[1] { n } else { k }, m];
        let (inputs_b, fast_sums, adds, batch) = (None, false, false, 1);
        Self { m, n, k, transposed, inputs, inputs_b, output, tf32, fast_sums, extra, adds, batch, align, ld }
    }

    /// out (M,N) = a (M,K) · b (N,K)ᵀ of 8-bit numbers, the one form that GPUs have; A is b, B is a. `sizes` are those of
    /// the rows of a.
    pub fn fp8(sizes: &Sizes, of_a: DType, fast_sums: bool, at: &Addresses) -> Self {
        let inputs_b = Some(of_a).filter(|of_a| *of_a != sizes.inputs);
        Self { inputs_b, fast_sums, ..Self::forward(sizes, at) }
    }

    /// out (rows,OC) = inp (rows,C) · weight (OC,C)ᵀ; A is the weight, B the input.
    pub fn forward(sizes: &Sizes, at: &Addresses) -> Self {
        Self::new(sizes, [sizes.oc, sizes.rows, sizes.ic], [true, false], at)
    }

    /// d_inp (rows,C) = d_out (rows,OC) · weight (OC,C); A is the weight, B the output's gradient.
    pub fn input_gradient(sizes: &Sizes, at: &Addresses) -> Self {
        Self::new(sizes, [sizes.ic, sizes.rows, sizes.oc], [false, false], at)
    }

    /// d_weight (OC,C) = d_out (rows,OC)ᵀ · inp (rows,C); A is the input, B the output's gradient.
    pub fn weight_gradient(sizes: &Sizes, at: &Addresses) -> Self {
        Self::new(sizes, [sizes.ic, sizes.oc, sizes.rows], [false, true], at)
    }

    /// out (M,N) = op(a) · op(b) of a batch of row-major matrices, where `op` transposes or does nothing; A is b, B is a.
    pub fn matmul(sizes: &Sizes, batch: usize, [of_a, of_b]: [bool; 2], at: &Addresses) -> Self {
        let Sizes { rows, ic, oc, .. } = *sizes;
        Self { batch, ..Self::new(sizes, [oc, rows, ic], [of_b, of_a], at) }
    }

    /// The product with this done to the result.
    pub fn extra(self, extra: Extra) -> Self {
        Self { extra, ..self }
    }

    /// The product of matrices that are parts of wider ones: `ld` are the elements from one row to the next of the row-major b, a
    /// and out of [`Problem::matmul`].
    pub fn strided(self, ld: [usize; 3]) -> Self {
        Self { ld, ..self }
    }

    /// Whether a matrix is a part of a wider one.
    pub fn is_strided(&self) -> bool {
        self.ld != [self.a().rows, self.b().rows, self.m]
    }

    /// The product that is added to D, or that overwrites it.
    pub fn adds(self, adds: bool) -> Self {
        Self { adds, ..self }
    }

    /// A as it is stored.
    pub fn a(&self) -> Matrix {
        let (rows, cols) = if self.transposed[0] { (self.k, self.m) } else { (self.m, self.k) };
        Matrix { dtype: self.inputs, rows, cols, ld: self.ld[0] }
    }

    /// B as it is stored.
    pub fn b(&self) -> Matrix {
        let (rows, cols) = if self.transposed[1] { (self.n, self.k) } else { (self.k, self.n) };
        Matrix { dtype: self.inputs_b.unwrap_or(self.inputs), rows, cols, ld: self.ld[1] }
    }

    /// The result.
    pub fn d(&self) -> Matrix {
        Matrix { dtype: self.output, rows: self.m, cols: self.n, ld: self.ld[2] }
    }

    /// Elements from one k to the next and from one row (A) or column (B) to the next.
    pub fn strides(&self) -> [[usize; 2]; 2] {
        let [ta, tb] = self.transposed;
        let (a, b) = (self.a().ld, self.b().ld);
        [if ta { [1, a] } else { [a, 1] }, if tb { [b, 1] } else { [1, b] }]
    }

    /// The library's description of it.
    pub fn describe(&self, at: &Addresses) -> Description {
        let epilogue = Epilogue { code: self.extra.code(), bias: at.bias, aux: at.aux };
        let Self { transposed, tf32, .. } = *self;
        let batch = i32::try_from(self.batch).unwrap_or(i32::MAX);
        let (scales, fast_sums) = (at.scales, self.fast_sums);
        Description {
            a: self.a(),
            b: self.b(),
            d: self.d(),
            batch,
            transposed,
            tf32,
            epilogue,
            scales,
            fast_sums,
        }
    }

    /// Whether the library can be asked: sizes it takes, and the leading dimension GELU's side matrix needs.
    pub fn is_askable(&self) -> bool {
        let fits = [self.m, self.n, self.k, self.batch]
            .into_iter()
            .all(|size| (1..=i32::MAX as usize).contains(&size));
        let gelu = matches!(self.extra, Extra::Gelu { .. } | Extra::GeluGrad);
        fits && (!gelu || self.m.is_multiple_of(8))
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch as f64
    }
}

/// Bytes of a matrix without gaps.
pub(crate) fn bytes_of(matrix: &Matrix) -> usize {
    matrix.ld * matrix.cols * matrix.dtype.size()
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |transposed: bool| if transposed { 'T' } else { 'N' };
        let Self { m, n, k, inputs, output, .. } = self;
        let (a, b) = (letter(self.transposed[0]), letter(self.transposed[1]));
        write!(f, "{m}x{n}x{k} {a}{b} {inputs}")?;
        if let Some(other) = self.inputs_b {
            write!(f, ",{other}")?;
        }
        write!(f, "->{output}")?;
        if self.tf32 {
            write!(f, " tf32")?;
        }
        if self.fast_sums {
            write!(f, " fast")?;
        }
        match self.extra {
            Extra::None => {}
            Extra::Bias => write!(f, " +bias")?,
            Extra::Gelu { bias: true } => write!(f, " +bias+gelu")?,
            Extra::Gelu { bias: false } => write!(f, " +gelu")?,
            Extra::GeluGrad => write!(f, " +gelu_grad")?,
            Extra::BiasGrad => write!(f, " +bias_grad")?,
        }
        if self.batch > 1 {
            write!(f, " batch {}", self.batch)?;
        }
        if self.adds {
            write!(f, " adds")?;
        }
        if self.is_strided() {
            write!(f, " ld {:?}", self.ld)?;
        }
        if self.align != [ALIGN; 4] {
            write!(f, " align {:?}", self.align)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { rows: 5, ic: 3, oc: 4, inputs: DType::F32, output: DType::F32, tf32: false };

    /// Element (i, j) of a column-major matrix, transposed or not.
    fn at(x: &[f32], matrix: Matrix, transposed: bool, i: usize, j: usize) -> f32 {
        let (i, j) = if transposed { (j, i) } else { (i, j) };
        assert!(i < matrix.rows && j < matrix.cols);
        x[i + j * matrix.ld]
    }

    /// The product as the library defines it.
    fn run(p: &Problem, a: &[f32], b: &[f32]) -> Vec<f32> {
        let mut d = vec![0.0; p.m * p.n];
        for i in 0..p.m {
            for j in 0..p.n {
                d[i + j * p.d().ld] = (0..p.k)
                    .map(|l| at(a, p.a(), p.transposed[0], i, l) * at(b, p.b(), p.transposed[1], l, j))
                    .sum();
            }
        }
        d
    }

    /// The product computed through the strides that the fallback kernel gets.
    fn run_strides(p: &Problem, a: &[f32], b: &[f32]) -> Vec<f32> {
        let [[ak, am], [bk, bn]] = p.strides();
        let one = |i: usize, j: usize| (0..p.k).map(|l| a[l * ak + i * am] * b[l * bk + j * bn]).sum();
        (0..p.n).flat_map(|j| (0..p.m).map(move |i| (i, j))).map(|(i, j)| one(i, j)).collect()
    }

    #[test]
    fn the_three_products_are_those_of_row_major_tensors() {
        let Sizes { rows, ic, oc, .. } = SIZES;
        let count = |n: usize| (0..n).map(|i| (i * i % 7) as f32 - 2.0).collect::<Vec<_>>();
        let (inp, weight, d_out) = (count(rows * ic), count(oc * ic), count(rows * oc));
        let none = Addresses::default();

        let forward = Problem::forward(&SIZES, &none);
        let got = run(&forward, &weight, &inp);
        assert_eq!(got, run_strides(&forward, &weight, &inp));
        for r in 0..rows {
            for o in 0..oc {
                let want: f32 = (0..ic).map(|c| inp[r * ic + c] * weight[o * ic + c]).sum();
                assert_eq!(got[r * oc + o], want);
            }
        }
        let input = Problem::input_gradient(&SIZES, &none);
        let got = run(&input, &weight, &d_out);
        assert_eq!(got, run_strides(&input, &weight, &d_out));
        for r in 0..rows {
            for c in 0..ic {
                let want: f32 = (0..oc).map(|o| d_out[r * oc + o] * weight[o * ic + c]).sum();
                assert_eq!(got[r * ic + c], want);
            }
        }
        let weights = Problem::weight_gradient(&SIZES, &none);
        let got = run(&weights, &inp, &d_out);
        assert_eq!(got, run_strides(&weights, &inp, &d_out));
        for o in 0..oc {
            for c in 0..ic {
                let want: f32 = (0..rows).map(|r| d_out[r * oc + o] * inp[r * ic + c]).sum();
                assert_eq!(got[o * ic + c], want);
            }
        }
    }

    #[test]
    fn a_matmul_is_that_of_row_major_matrices() {
        let Sizes { rows, ic, oc, .. } = SIZES;
        let count = |n: usize| (0..n).map(|i| (i * i % 7) as f32 - 2.0).collect::<Vec<_>>();
        let (a, b) = (count(rows * ic), count(ic * oc));
        for transposed in [[false, false], [false, true], [true, false]] {
            let problem = Problem::matmul(&SIZES, 3, transposed, &Addresses::default());
            let got = run(&problem, &b, &a);
            assert_eq!(got, run_strides(&problem, &b, &a));
            let of_a = |r: usize, k: usize| if transposed[0] { a[k * rows + r] } else { a[r * ic + k] };
            let of_b = |k: usize, c: usize| if transposed[1] { b[c * ic + k] } else { b[k * oc + c] };
            for (r, c) in (0..rows).flat_map(|r| (0..oc).map(move |c| (r, c))) {
                assert_eq!(got[r * oc + c], (0..ic).map(|k| of_a(r, k) * of_b(k, c)).sum::<f32>());
            }
            assert!(problem.to_string().contains(" batch 3"), "{problem}");
            assert_eq!(problem.flops(), 3.0 * 2.0 * (rows * ic * oc) as f64);
        }
    }

    #[test]
    fn parts_of_wider_matrices_are_told_apart() {
        let Sizes { rows, ic, oc, .. } = SIZES;
        let count = |n: usize| (0..n).map(|i| (i * i % 7) as f32 - 2.0).collect::<Vec<_>>();
        let (a, b) = (count(rows * 8), count(oc * 9));
        let plain = Problem::matmul(&SIZES, 1, [false, true], &Addresses::default());
        assert!(!plain.is_strided() && !plain.to_string().contains("ld"));
        let problem = plain.strided([9, 8, oc + 2]);
        assert!(problem.is_strided() && problem.to_string().contains(" ld [9, 8, 6]"), "{problem}");
        let got = run_strides(&problem, &b, &a);
        for (r, c) in (0..rows).flat_map(|r| (0..oc).map(move |c| (r, c))) {
            assert_eq!(got[r * oc + c], (0..ic).map(|k| a[r * 8 + k] * b[c * 9 + k]).sum::<f32>());
        }
        assert_eq!((problem.d().ld, problem.d().rows), (oc + 2, oc));
    }

    #[test]
    fn alignment_counts_only_up_to_what_slots_promise() {
        let at = |a| Addresses { a, b: 0x1000, d: 0x40, ..Addresses::default() };
        assert_eq!(at(0x7000).align(), [64; 4]);
        assert_eq!(at(0x7008).align(), [8, 64, 64, 64]);
    }

    #[test]
    fn texts_name_everything() {
        let at = Addresses { a: 64, b: 64, d: 64, ..Addresses::default() };
        let sizes = Sizes { inputs: DType::BF16, tf32: true, ..SIZES };
        let p = Problem::forward(&sizes, &at);
        assert_eq!(p.to_string(), format!("4x5x3 TN {}->{}", DType::BF16, DType::F32));
        let p = Problem::weight_gradient(&Sizes { tf32: true, ..SIZES }, &Addresses { a: 8, ..at });
        let p = p.extra(Extra::BiasGrad).adds(true);
        assert!(p.to_string().ends_with(" tf32 +bias_grad adds align [8, 64, 64, 64]"), "{p}");
    }

    #[test]
    fn gelu_needs_an_aligned_side_matrix() {
        let p = Problem::forward(&SIZES, &Addresses::default());
        assert!(p.is_askable() && p.extra(Extra::Bias).is_askable());
        assert!(!p.extra(Extra::Gelu { bias: true }).is_askable());
        assert!(!Problem::forward(&Sizes { ic: 0, ..SIZES }, &Addresses::default()).is_askable());
    }
}
