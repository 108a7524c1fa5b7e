//! Updates of gradients and parameters, f32.

/// One step of AdamW with decoupled weight decay.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// n elements
    pub param: *mut f32,
    /// n elements
    pub grad: *const f32,
    /// n elements, the first moment
    pub m: *mut f32,
    /// n elements, the second moment
    pub v: *mut f32,
    /// The number of elements.
    pub n: usize,
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// The number of this step, from 1.
    pub step: i32,
}

/// `grad = 0`.
#[derive(Clone, Copy, Debug)]
pub struct ZeroGrad {
    /// n elements
    pub grad: *mut f32,
    /// The number of elements.
    pub n: usize,
}

/// `total_norm = ‖grad‖`; if that is above `clip`, `grad *= clip / total_norm`.
#[derive(Clone, Copy, Debug)]
pub struct GradClip {
    /// n elements
    pub grad: *mut f32,
    /// 1
    pub total_norm: *mut f32,
    /// The largest norm.
    pub clip: f32,
    /// The number of elements.
    pub n: usize,
}

/// `table[indices[i]] += rows[i]`, in the order of i.
#[derive(Clone, Copy, Debug)]
pub struct ScatterAdd {
    /// n · width
    pub rows: *const f32,
    /// n; on a GPU, indices that are out of range are skipped
    pub indices: *const i32,
    /// (rows of the table) · width
    pub table: *mut f32,
    /// The number of rows to add.
    pub n: usize,
    /// Elements of a row.
    pub width: usize,
    /// Rows of the table, if known.
    pub table_rows: Option<usize>,
}
