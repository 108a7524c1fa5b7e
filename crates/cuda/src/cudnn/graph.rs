//! An operation graph under construction: tensors, then the operations between them.

use super::descriptor::{Attribute, Descriptor, Kind};
use crate::Result;
use crate::ffi::cudnn::Cudnn;
use std::rc::Rc;

pub(crate) use cudarc::cudnn::sys::cudnnDataType_t as Data;
pub(crate) use cudarc::cudnn::sys::cudnnPointwiseMode_t as Pointwise;
pub(crate) use cudarc::cudnn::sys::cudnnReduceTensorOp_t as Reduce;

pub(crate) const F32: Data = Data::CUDNN_DATA_FLOAT;
pub(crate) const BF16: Data = Data::CUDNN_DATA_BFLOAT16;
pub(crate) const F16: Data = Data::CUDNN_DATA_HALF;
pub(crate) const I32: Data = Data::CUDNN_DATA_INT32;
pub(crate) const BOOL: Data = Data::CUDNN_DATA_BOOLEAN;

/// Bytes every address must be a multiple of. cuDNN does not check it: a wrong one gives wrong results.
pub(crate) const ALIGNMENT: u64 = 16;

/// Tensors that are memory of ours; the number is their id in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Q = 1,
    K,
    V,
    Out,
    /// Log of the sum of exponentials of each row of scores.
    Stats,
    DOut,
    DQ,
    DK,
    DV,
    /// Sum over the head of d_out * out, for each row.
    RowSum,
    /// f32 sums of d_q.
    DqSums,
}

/// Ids of everything else start here.
const FIRST_FREE_ID: i64 = 100;

/// Sizes and strides in elements, of [batch, heads, rows, columns].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub dims: [i64; 4],
    pub strides: [i64; 4],
}

impl View {
    /// A view of rows that follow each other.
    pub fn packed(dims: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = dims;
        Self { dims, strides: [heads * rows * columns, rows * columns, columns, 1] }
    }

    /// Elements from the first to the last one.
    pub fn extent(self) -> usize {
        let last = self.dims.iter().zip(&self.strides).map(|(dim, stride)| (dim - 1) * stride).sum::<i64>();
        usize::try_from(last + 1).unwrap_or(0)
    }

    /// Rows and columns exchanged, over the same memory.
    pub fn transposed(self) -> Self {
        let ([b, h, r, c], [sb, sh, sr, sc]) = (self.dims, self.strides);
        Self { dims: [b, h, c, r], strides: [sb, sh, sc, sr] }
    }
}

/// A tensor of a graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    index: usize,
    pub view: View,
}

/// What holds a tensor's numbers.
enum Home {
    Memory(Role),
    /// No memory: the numbers exist between operations only.
    Virtual,
    /// A number given with each execution.
    Number,
}

/// The graph. Operations are given to cuDNN in the order they were added.
pub(crate) struct Graph {
    cudnn: Rc<Cudnn>,
    next_id: i64,
    tensors: Vec<Descriptor>,
    settings: Vec<Descriptor>,
    pub ops: Vec<Descriptor>,
    pub roles: Vec<Role>,
    /// Numbers by id.
    pub numbers: Vec<(i64, f32)>,
}

impl Graph {
    pub fn new(cudnn: &Rc<Cudnn>) -> Self {
        Self {
            cudnn: cudnn.clone(),
            next_id: FIRST_FREE_ID,
            tensors: Vec::new(),
            settings: Vec::new(),
            ops: Vec::new(),
            roles: Vec::new(),
            numbers: Vec::new(),
        }
    }

    /// A tensor in memory.
    pub fn memory(&mut self, role: Role, data: Data, view: View) -> Result<Tensor> {
        self.roles.push(role);
        self.tensor(&format!("{role:?}"), data, view, Home::Memory(role))
    }

    /// A tensor that exists between operations only.
    pub fn between(&mut self, name: &str, data: Data, view: View) -> Result<Tensor> {
        self.tensor(name, data, view, Home::Virtual)
    }

    /// A number.
    pub fn number(&mut self, name: &str, value: f32) -> Result<Tensor> {
        self.numbers.push((self.next_id, value));
        self.tensor(name, F32, View { dims: [1; 4], strides: [1; 4] }, Home::Number)
    }

    fn tensor(&mut self, name: &str, data: Data, view: View, home: Home) -> Result<Tensor> {
        let id = match home {
            Home::Memory(role) => role as i64,
            Home::Virtual | Home::Number => {
                self.next_id += 1;
                self.next_id - 1
            }
        };
        let mut tensor = Descriptor::new(&self.cudnn, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR, name)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[data])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &view.dims)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &view.strides)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT as i64])?;
        match home {
            Home::Memory(_) => {}
            Home::Virtual => tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true])?,
            Home::Number => tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?,
        }
        tensor.finalize()?;
        self.tensors.push(tensor);
        Ok(Tensor { index: self.tensors.len() - 1, view })
    }

    /// `c = a · b` over the last two dimensions, in f32; `b` may have fewer heads than `a`, each then serves several.
    pub fn matmul(&mut self, name: &str, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
        let mut how = Descriptor::new(&self.cudnn, Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR, name)?;
        how.set(Attribute::CUDNN_ATTR_MATMUL_COMP_TYPE, &[F32])?;
        how.finalize()?;
        let tensors = [
            (Attribute::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
            (Attribute::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
            (Attribute::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
        ];
        let kind = Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR;
        self.op(name, kind, &tensors, Some((Attribute::CUDNN_ATTR_OPERATION_MATMUL_DESC, how)))
    }

    /// An operation on single elements; `b` is its second input, `mask` its third.
    pub fn pointwise(&mut self, name: &str, what: PointwiseOp, x: Tensor, y: Tensor) -> Result<()> {
        let mut how = Descriptor::new(&self.cudnn, Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR, name)?;
        how.set(Attribute::CUDNN_ATTR_POINTWISE_MODE, &[what.mode])?;
        how.set(Attribute::CUDNN_ATTR_POINTWISE_MATH_PREC, &[what.compute])?;
        if let Some(axis) = what.axis {
            how.set(Attribute::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        how.finalize()?;
        let mut tensors = vec![
            (Attribute::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x),
            (Attribute::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y),
        ];
        tensors.extend(what.b.map(|b| (Attribute::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b)));
        tensors.extend(what.mask.map(|mask| (Attribute::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, mask)));
        let kind = Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR;
        self.op(name, kind, &tensors, Some((Attribute::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how)))
    }

    /// `y = op(x)` to a new tensor of f32 between operations.
    pub fn unary(&mut self, name: &str, mode: Pointwise, x: Tensor) -> Result<Tensor> {
        let y = self.between(name, F32, x.view)?;
        self.pointwise(name, PointwiseOp::new(mode), x, y)?;
        Ok(y)
    }

    /// `y = x op b` to a new tensor of f32 between operations.
    pub fn binary(&mut self, name: &str, mode: Pointwise, x: Tensor, b: Tensor) -> Result<Tensor> {
        let y = self.between(name, F32, x.view)?;
        self.pointwise(name, PointwiseOp { b: Some(b), ..PointwiseOp::new(mode) }, x, y)?;
        Ok(y)
    }

    /// Reduces the dimensions in which `y` is smaller than `x`.
    pub fn reduce(&mut self, name: &str, mode: Reduce, x: Tensor, y: Tensor) -> Result<()> {
        let mut how = Descriptor::new(&self.cudnn, Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR, name)?;
        how.set(Attribute::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[F32])?;
        how.set(Attribute::CUDNN_ATTR_REDUCTION_OPERATOR, &[mode])?;
        how.finalize()?;
        let tensors = [
            (Attribute::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x),
            (Attribute::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y),
        ];
        let kind = Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR;
        self.op(name, kind, &tensors, Some((Attribute::CUDNN_ATTR_OPERATION_REDUCTION_DESC, how)))
    }

    /// The elements of `x` with rows and columns exchanged.
    pub fn transpose(&mut self, name: &str, data: Data, x: Tensor) -> Result<Tensor> {
        let y = self.between(name, data, x.view.transposed())?;
        let tensors = [
            (Attribute::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x),
            (Attribute::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y),
        ];
        self.op(name, Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &tensors, None)?;
        Ok(y)
    }

    fn op(
        &mut self,
        name: &str,
        kind: Kind,
        tensors: &[(Attribute, Tensor)],
        how: Option<(Attribute, Descriptor)>,
    ) -> Result<()> {
        let mut op = Descriptor::new(&self.cudnn, kind, name)?;
        if let Some((attribute, how)) = how {
            op.set_descriptors(attribute, &[&how])?;
            self.settings.push(how);
        }
        for &(attribute, tensor) in tensors {
            op.set_descriptors(attribute, &[&self.tensors[tensor.index]])?;
        }
        op.finalize()?;
        self.ops.push(op);
        Ok(())
    }
}

/// What a pointwise operation does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PointwiseOp {
    pub mode: Pointwise,
    pub b: Option<Tensor>,
    pub mask: Option<Tensor>,
    pub compute: Data,
    pub axis: Option<i64>,
}

impl PointwiseOp {
    /// An operation in f32, of one input.
    pub fn new(mode: Pointwise) -> Self {
        Self { mode, b: None, mask: None, compute: F32, axis: None }
    }
}
