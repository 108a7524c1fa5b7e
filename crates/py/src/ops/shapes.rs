//! The sizes of a call: given, or told by the shapes of its arrays; and whether all arrays fit them.

use super::arguments::Given;
use super::sides::{Sides, Sizes, same};
use crate::array::{NumpyArray, NumpyCall};
use ironhorse::ops::spec::{Arg, Default, Dim, Op, Role};
use ironhorse::ops::text;
use pyo3::prelude::*;

/// The sizes and arrays of a call, by position in the op's arguments.
pub struct Shapes<'a, 'py, const N: usize> {
    op: &'static Op,
    twins: &'a [u32],
    sizes: Sizes<N>,
    /// The number of first elements to work on, where that is given.
    limit: Option<(usize, i64)>,
    /// The arrays found so far.
    pub arrays: [Option<NumpyArray<'py>>; N],
    /// Whether the sizes were given: then arrays may have any shape with as many elements.
    explicit: bool,
}

/// For each argument of an op, the arrays before it that have the same dimensions: bit i for argument i.
pub fn twins(op: &Op) -> Vec<u32> {
    let twin = |a: &Arg, b: &Arg| b.role.elem().is_some() && a.dims == b.dims;
    let before = |i: usize| op.args[..i].iter().enumerate().filter(move |(_, arg)| twin(&op.args[i], arg));
    (0..op.args.len()).map(|i| before(i).fold(0, |bits, (at, _)| bits | 1 << at)).collect()
}

impl<'a, 'py, const N: usize> Shapes<'a, 'py, N> {
    pub fn new(op: &'static Op, twins: &'a [u32]) -> Self {
        Self { op, twins, sizes: Sizes::NONE, limit: None, arrays: [const { None }; N], explicit: false }
    }

    /// Takes a size that is given.
    pub fn give(&mut self, i: usize, size: i64) {
        let arg = &self.op.args[i];
        if arg.first {
            self.limit = Some((i, size));
        } else {
            self.explicit |= arg.solved();
            self.sizes.set(i, size);
        }
    }

    /// A size; 0 before [`Self::solve`].
    pub fn size(&self, i: usize) -> i64 {
        match self.limit {
            Some((limited, size)) if limited == i => size,
            _ => self.sizes.get(i).unwrap_or(0),
        }
    }

    /// About how many elements the op touches.
    pub fn work(&self) -> usize {
        let counts = |i: &usize| !matches!(self.op.args[*i].default, Default::Int(_));
        let sizes = self.op.sets.sizes.into_iter().filter(counts).filter_map(|i| self.sizes.get(i));
        let product = sizes.fold(1_i64, i64::saturating_mul);
        product.max(0) as usize
    }

    /// Finds the sizes that are not given, and checks the arrays that are.
    pub fn solve(&mut self, call: &NumpyCall<'py>, given: &Given<'_, 'py, N>) -> PyResult<()> {
        if self.explicit || !self.told_in_order() {
            self.solve_in_passes(call, given)?;
        }
        match self.limit {
            Some((i, n)) if !(0..=self.sizes.get(i).unwrap_or(0)).contains(&n) => {
                let (name, most) = (self.op.args[0].name, self.sizes.get(i).unwrap_or(0));
                Err(call.invalid(format_args!("`n` is {n}, expected 0 to {most}, the elements of `{name}`")))
            }
            _ => Ok(()),
        }
    }

    /// The usual case: every array has the shape of an earlier one, or tells sizes that no other contradicts. False if some
    /// array needs a closer look; then nothing has changed.
    fn told_in_order(&mut self) -> bool {
        let mut sizes = self.sizes;
        let mut lead: Option<&[usize]> = None;
        for i in self.op.sets.inputs {
            let (arg, Some(array)) = (&self.op.args[i], &self.arrays[i]) else { continue };
            let like = self.like(i);
            let fits = match like {
                Some(shape) => same(array.shape(), shape),
                None if arg.role == Role::Unused => true,
                None => self.sides(arg.dims, array.shape(), &mut sizes),
            };
            let open =
                |dim: &Dim| matches!(*dim, Dim::AtLeast(i, j) if sizes.get(i).and(sizes.get(j)).is_none());
            if !fits || self.op.sets.least.has(i) && arg.dims.iter().any(open) {
                return false;
            }
            if like.is_none() && self.leads(arg.dims) {
                let found = array.shape().get(..array.shape().len() + 1 - arg.dims.len()).unwrap_or(&[]);
                // The leading dimensions of a second array must be those of the first, not only as many elements.
                if !same(lead.unwrap_or(found), found) {
                    return false;
                }
                lead = lead.or(Some(found));
            }
        }
        let known = self.op.sets.solved.into_iter().all(|i| sizes.get(i).is_some());
        if known {
            self.sizes = sizes;
        }
        known
    }

    /// [`Self::solve`] where sizes are given, arrays are flat, or something is wrong.
    fn solve_in_passes(&mut self, call: &NumpyCall<'py>, given: &Given<'_, 'py, N>) -> PyResult<()> {
        self.all_or_none(call, given)?;
        // The second pass is for arrays whose sizes others tell.
        for _ in 0..2 {
            for i in 0..self.op.args.len() {
                if let Some(array) = self.arrays[i].take() {
                    self.told_by(i, array.shape());
                    self.arrays[i] = Some(array);
                }
            }
            if self.op.sets.solved.into_iter().all(|i| self.sizes.get(i).is_some()) {
                break;
            }
        }
        if self.explicit {
            for (i, arg) in self.op.args.iter().enumerate() {
                if let (None, Default::Hidden(_)) = (self.sizes.get(i), arg.default)
                    && let Some(size) = arg.named.default.and_then(|other| self.sizes.get(other))
                {
                    self.sizes.set(i, size);
                }
            }
        }
        for i in 0..self.op.args.len() {
            if let Some(array) = &self.arrays[i] {
                self.expect(call, i, array)?;
            }
        }
        Ok(())
    }

    /// Sizes that arrays can tell are given together or not at all.
    fn all_or_none(&self, call: &NumpyCall<'py>, given: &Given<'_, 'py, N>) -> PyResult<()> {
        let is = |arg: &Arg| arg.solved() && !arg.first && text::in_python(arg);
        let missing = |i: usize| given.values[i].as_ref().is_none_or(|value| value.is_none());
        if self.explicit && self.op.args.iter().enumerate().any(|(i, arg)| is(arg) && missing(i)) {
            let names: Vec<_> = self.op.args.iter().filter(|arg| is(arg)).map(|arg| arg.name).collect();
            return Err(call.invalid(format_args!("give all of {}, or none of them", names.join(", "))));
        }
        Ok(())
    }

    /// Whether the first side of an array stands for any number of dimensions.
    fn leads(&self, dims: &[Dim]) -> bool {
        matches!(dims, [Dim::Size(i), ..] if self.op.args[*i].leading)
    }

    /// Takes the sizes that the shape of an array tells.
    fn told_by(&mut self, i: usize, shape: &[usize]) {
        let dims = self.op.args[i].dims;
        // This array determines no size; `expect` compares its shape.
        if dims.iter().all(|&dim| self.side(dim).is_some()) {
            return;
        }
        let mut sizes = self.sizes;
        if self.sides(dims, shape, &mut sizes) {
            self.sizes = sizes;
            return;
        }
        // A flat array tells the one size that is not known.
        if let &[len] = shape {
            let unknown = |dim: &&Dim| matches!(**dim, Dim::Size(i) if self.sizes.get(i).is_none());
            let mut rest = 1_i64;
            for dim in dims.iter().filter(|dim| !unknown(dim)) {
                rest = rest.saturating_mul(self.side(*dim).unwrap_or(0));
            }
            let mut open = dims.iter().filter(unknown);
            if let (Some(Dim::Size(open)), None) = (open.next(), open.next())
                && rest > 0
                && len as i64 % rest == 0
            {
                self.sizes.set(*open, len as i64 / rest);
            }
        }
    }

    /// Takes the sizes of the sides of a shape; false if it is another shape.
    fn sides(&self, dims: &[Dim], shape: &[usize], sizes: &mut Sizes<N>) -> bool {
        let mut fits = |dim: &Dim, side: i64| match *dim {
            Dim::Size(i) => sizes.get_or_set(i, side) == side,
            Dim::Half(i) => sizes.get_or_set(i, 2 * side) / 2 == side,
            Dim::Times(i, j) => match (sizes.get(i), sizes.get(j)) {
                (Some(a), Some(b)) => a.checked_mul(b) == Some(side),
                (Some(a), None) | (None, Some(a)) if a > 0 && side % a == 0 => {
                    let other = if sizes.get(i).is_none() { i } else { j };
                    sizes.set(other, side / a);
                    true
                }
                _ => false,
            },
            Dim::AtLeast(i, j) => match (sizes.get(i), sizes.get(j)) {
                (Some(a), Some(b)) => a.checked_add(b).is_some_and(|least| side >= least),
                _ => true,
            },
            Dim::Above(_) => true,
        };
        let (dims, shape) = if self.leads(dims) {
            let Some(lead) = (shape.len() + 1).checked_sub(dims.len()) else { return false };
            if !fits(&dims[0], shape[..lead].iter().product::<usize>() as i64) {
                return false;
            }
            (&dims[1..], &shape[lead..])
        } else {
            (dims, shape)
        };
        dims.len() == shape.len() && dims.iter().zip(shape).all(|(dim, &side)| fits(dim, side as i64))
    }

    /// A side, if its sizes are known; the least where it is at least that.
    fn side(&self, dim: Dim) -> Option<i64> {
        match dim {
            Dim::Size(i) => self.sizes.get(i),
            Dim::Half(i) => self.sizes.get(i).map(|size| size / 2),
            Dim::Times(i, j) => self.sizes.get(i)?.checked_mul(self.sizes.get(j)?),
            Dim::AtLeast(i, j) => self.sizes.get(i)?.checked_add(self.sizes.get(j)?),
            Dim::Above(_) => None,
        }
    }

    /// Refuses an array that does not fit the sizes: other dimensions, and not flat with as many elements.
    pub fn expect(&self, call: &NumpyCall<'py>, i: usize, array: &NumpyArray<'py>) -> PyResult<()> {
        let arg = &self.op.args[i];
        if arg.role == Role::Unused || self.like(i).is_some_and(|shape| same(shape, array.shape())) {
            return Ok(());
        }
        let least = arg.dims.iter().any(|dim| matches!(dim, Dim::AtLeast(..)));
        let elements = arg.dims.iter().try_fold(1_i64, |product, &dim| {
            self.side(dim).filter(|&side| side >= 0).and_then(|side| product.checked_mul(side))
        });
        let (found, count) = (array.shape(), array.len() as i64);
        let enough = elements.is_some_and(|elements| count == elements || (least && count > elements));
        let shaped = || match self.like(i) {
            Some(shape) => found == shape,
            None if least => found.len() == arg.dims.len() && self.side(arg.dims[1]) == Some(found[1] as i64),
            None => self.is_expanded(arg, found),
        };
        if enough && (self.explicit || found.len() == 1 || shaped()) {
            return Ok(());
        }
        Err(call.invalid(format_args!("`{}` is {found:?}, expected {}", arg.name, self.described(i))))
    }

    /// The shape of an earlier array with the same dimensions.
    fn like(&self, i: usize) -> Option<&[usize]> {
        let mut twins = self.twins[i];
        while twins != 0 {
            if let Some(array) = &self.arrays[twins.trailing_zeros() as usize] {
                return Some(array.shape());
            }
            twins &= twins - 1;
        }
        None
    }

    /// Whether a shape is the one that the sizes give.
    fn is_expanded(&self, arg: &Arg, found: &[usize]) -> bool {
        let fits = |dims: &[Dim], found: &[usize]| {
            let mut sides = dims.iter().zip(found);
            dims.len() == found.len() && sides.all(|(&dim, &side)| self.side(dim) == Some(side as i64))
        };
        match self.leading_dimensions().filter(|_| self.leads(arg.dims)) {
            Some(lead) if found.starts_with(lead) && fits(&arg.dims[1..], &found[lead.len()..]) => true,
            _ => fits(arg.dims, found),
        }
    }

    /// The shape that the sizes give, with the leading dimensions as the first array has them.
    fn expanded(&self, arg: &Arg) -> Option<Sides> {
        let mut shape = Sides::NONE;
        for (at, &dim) in arg.dims.iter().enumerate() {
            let side = usize::try_from(self.side(dim)?).ok()?;
            match self.leading_dimensions().filter(|_| at == 0 && self.leads(arg.dims)) {
                Some(lead) if lead.iter().product::<usize>() == side => shape.extend(lead),
                _ => shape.extend(&[side]),
            }
        }
        Some(shape)
    }

    fn leading_dimensions(&self) -> Option<&[usize]> {
        let mut arrays = self.op.args.iter().zip(&self.arrays);
        let (arg, array) = arrays.find(|(arg, array)| self.leads(arg.dims) && array.is_some())?;
        let shape = array.as_ref()?.shape();
        shape.get(..(shape.len() + 1).checked_sub(arg.dims.len())?)
    }

    /// The shape of an array to make, in `room` unless another array has it.
    pub fn shape<'s>(
        &'s self,
        call: &NumpyCall<'py>,
        i: usize,
        room: &'s mut Option<Sides>,
    ) -> PyResult<&'s [usize]> {
        if let Some(shape) = self.like(i) {
            return Ok(shape);
        }
        let arg = &self.op.args[i];
        *room = self.expanded(arg);
        room.as_deref()
            .ok_or_else(|| call.invalid(format_args!("`{}` cannot have {}", arg.name, self.described(i))))
    }

    /// What is expected of an array: numbers where sizes are known, their names elsewhere.
    fn described(&self, i: usize) -> String {
        let arg = &self.op.args[i];
        if let Some(shape) = self.like(i).filter(|_| !self.explicit) {
            return format!("{shape:?}");
        }
        if let Some(shape) =
            self.expanded(arg).filter(|_| !self.explicit && !text::shape(self.op, arg).contains("least"))
        {
            return format!("{:?}", &*shape);
        }
        let name = |i: usize| match self.sizes.get(i) {
            Some(size) => size.to_string(),
            None => self.op.args[i].name.to_owned(),
        };
        let side = |dim: &Dim| match (*dim, self.side(*dim)) {
            (Dim::AtLeast(i, j), _) => format!("at least {} + {}", name(i), name(j)),
            (_, Some(side)) => side.to_string(),
            (Dim::Size(i) | Dim::Above(i), None) => self.op.args[i].name.to_owned(),
            (Dim::Half(i), None) => format!("{} / 2", name(i)),
            (Dim::Times(i, j), None) => format!("{} * {}", name(i), name(j)),
        };
        let sides: Vec<_> = arg.dims.iter().map(side).collect();
        format!("{}[{}]", if self.explicit { "the elements of " } else { "" }, sides.join(", "))
    }
}
