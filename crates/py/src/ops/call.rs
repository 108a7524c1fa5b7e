//! A call of an op from Python.

use super::arguments::{Arguments, Given, Signature};
use super::shapes::{Shapes, twins};
use crate::array::{Indices, NumpyArray, NumpyCall, Placed};
use ironhorse::ops::OpError;
use ironhorse::ops::spec::{Bound as Limit, Default, Elem, Op, Role, Value};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::hash::{BuildHasher, RandomState};

/// An op as Python calls it.
pub struct Function {
    signature: Signature,
    /// See [`twins`].
    twins: Vec<u32>,
    call: fn(&Self, &Arguments<'_, '_>) -> PyResult<Py<PyAny>>,
}

impl Function {
    /// The function of an op under a name.
    pub fn new(py: Python<'_>, op: &'static Op, name: &'static str) -> Self {
        // The room for the arguments of a call is cleared each time: small ops have little of it.
        let call = match op.args.len() {
            0..=4 => call::<4>,
            5..=8 => call::<8>,
            9..=12 => call::<12>,
            _ => call::<16>,
        };
        Self { signature: Signature::new(py, op, name), twins: twins(op), call }
    }

    /// Calls it.
    pub fn call(&self, arguments: &Arguments<'_, '_>) -> PyResult<Py<PyAny>> {
        (self.call)(self, arguments)
    }
}

/// The values of a call, to take along into work without the interpreter's lock.
struct Values<const N: usize>([Value; N]);

// SAFETY: the pointers are used by one call, in the thread that made it or in threads it waits for.
unsafe impl<const N: usize> Send for Values<N> {}
// SAFETY: as for Send.
unsafe impl<const N: usize> Sync for Values<N> {}

/// A call of an op of at most N arguments.
fn call<const N: usize>(function: &Function, arguments: &Arguments<'_, '_>) -> PyResult<Py<PyAny>> {
    let py = arguments.py;
    let given = function.signature.parse::<N>(arguments)?;
    let op = given.op;
    let mut call = match &given.device {
        None => NumpyCall::on_host(py, op.name),
        Some(device) => NumpyCall::new(py, op.name, device.to_str()?)?,
    };
    let mut shapes = Shapes::new(op, &function.twins);
    scalars(&call, &given, &mut shapes)?;
    let mut indices = None;
    inputs(&mut call, &given, &mut shapes, &mut indices)?;
    shapes.solve(&call, &given)?;
    let mut values = Values([Value::Pointer(std::ptr::null_mut()); N]);
    fill(&mut values.0, &given, &shapes)?;
    let makes = |i: usize| given.values[i].as_ref().is_none_or(|value| value.is_none());
    let makes = op.sets.writes.into_iter().any(makes);
    if makes {
        // Before memory of these sizes is allocated.
        op.check_scalars(&values.0[..op.args.len()]).map_err(|error| call.failed(&error))?;
    }
    outputs(&mut call, &given, &mut shapes, &values.0)?;
    for i in op.sets.arrays {
        if let Some(array) = &shapes.arrays[i] {
            values.0[i] = Value::Pointer(array.slot().host());
        }
    }
    if call.on_gpu() {
        on_gpu(&call, op, &shapes, &mut values)?;
    } else {
        // SAFETY: `Shapes` saw that every array has as many elements as the sizes say; the caller holds the arrays, and
        // another thread that writes one meanwhile can change numbers only: indices are private copies.
        call.run(shapes.work(), |on| unsafe { run(op, &values, makes, on) })?;
    }
    drop(indices);
    results(py, op, &mut shapes)
}

/// The arrays that are given and read, and a private copy of indices.
fn inputs<'py, const N: usize>(
    call: &mut NumpyCall<'py>,
    given: &Given<'_, 'py, N>,
    shapes: &mut Shapes<'_, 'py, N>,
    indices: &mut Option<Indices>,
) -> PyResult<()> {
    for i in given.op.sets.inputs {
        let arg = &given.op.args[i];
        let mut array = match (arg.role, &given.values[i]) {
            (Role::Read(Elem::U64), Some(object)) if object.is_none() => continue,
            (Role::Read(elem), Some(object)) => call.input(arg.name, elem, object)?,
            (Role::Update, Some(object)) => call.output(arg.name, Elem::F32, object)?,
            (Role::Unused, Some(object)) if !object.is_none() => call.output(arg.name, Elem::F32, object)?,
            _ => continue,
        };
        if arg.below.is_some() {
            call.private(&mut array, indices);
        }
        shapes.arrays[i] = Some(array);
    }
    Ok(())
}

/// Runs an op.
///
/// # Safety
/// As [`Op::call`].
unsafe fn run<const N: usize>(
    op: &'static Op,
    values: &Values<N>,
    checked: bool,
    on: &Placed,
) -> Result<(), OpError> {
    let values = &values.0[..op.args.len()];
    // SAFETY: guaranteed by the caller.
    unsafe { if checked { op.call_checked(values, on.stream) } else { op.call(values, on.stream) } }
}

/// Runs an op on copies of its arrays on a GPU.
#[cold]
fn on_gpu<const N: usize>(
    call: &NumpyCall<'_>,
    op: &'static Op,
    shapes: &Shapes<'_, '_, N>,
    values: &mut Values<N>,
) -> PyResult<()> {
    // SAFETY: host arrays of the sizes of the values; overlaps must be seen before they are copied apart.
    unsafe { op.check(&values.0[..op.args.len()]) }.map_err(|error| call.failed(&error))?;
    let slots: [_; N] = std::array::from_fn(|i| shapes.arrays[i].as_ref().map(NumpyArray::slot));
    call.run(shapes.work(), |on| {
        for (i, slot) in slots.iter().enumerate() {
            if let (true, Some(slot)) = (op.sets.arrays.has(i), slot) {
                values.0[i] = Value::Pointer(on.address(*slot));
            }
        }
        // SAFETY: as in `call`.
        unsafe { run(op, values, true, on) }
    })
}

/// Takes the sizes that are given.
fn scalars<const N: usize>(
    call: &NumpyCall<'_>,
    given: &Given<'_, '_, N>,
    shapes: &mut Shapes<'_, '_, N>,
) -> PyResult<()> {
    for i in given.op.sets.sizes {
        let arg = &given.op.args[i];
        match (&given.values[i], arg.default) {
            (Some(object), _) if !object.is_none() => {
                let size = crate::array::integer(object)?;
                if let (Limit::UpTo(name), ..=0) = (arg.bound, size) {
                    return Err(
                        call.invalid(format_args!("`{}` is {size}, expected 1 to `{name}`", arg.name))
                    );
                }
                shapes.give(i, size);
            }
            (_, Default::Int(size)) => shapes.give(i, size),
            _ => {}
        }
    }
    Ok(())
}

/// All values but the addresses of arrays.
fn fill<const N: usize>(
    values: &mut [Value; N],
    given: &Given<'_, '_, N>,
    shapes: &Shapes<'_, '_, N>,
) -> PyResult<()> {
    let op = given.op;
    for i in op.sets.sizes {
        values[i] = Value::Int(shapes.size(i));
    }
    for i in op.sets.scalars {
        let arg = &op.args[i];
        let object =
            given.values[i].as_ref().filter(|object| !object.is_none() || arg.default == Default::Absent);
        let size = || arg.named.default.map_or(1, |i| shapes.size(i)).max(1) as f32;
        values[i] = match (arg.role, object, arg.default) {
            (Role::Double, Some(object), _) => Value::Number(object.extract()?),
            (Role::Double, None, Default::Number(x)) => Value::Number(x),
            (Role::Number, Some(object), _) => Value::from(object.extract::<f32>()?),
            (Role::Number, None, Default::InverseRoot(_)) => Value::from(1.0 / size().sqrt()),
            (Role::Number, None, Default::Inverse(_)) => Value::from(1.0 / size()),
            (Role::Number, None, Default::Number(x)) => Value::from(x as f32),
            (Role::Flag, Some(object), _) => Value::Flag(object.is_truthy()?),
            (Role::Flag, None, default) => Value::Flag(default == Default::Flag(true)),
            // Beyond an i32, the largest: no count of steps is that long.
            (Role::Int, Some(object), _) => {
                Value::Int(crate::array::integer(object)?.clamp(i32::MIN.into(), i32::MAX.into()))
            }
            (Role::Int, None, Default::Int(x)) => Value::Int(x),
            _ => continue,
        };
    }
    Ok(())
}

/// The arrays that are written, given or made, and seeds that are not given.
fn outputs<'py, const N: usize>(
    call: &mut NumpyCall<'py>,
    given: &Given<'_, 'py, N>,
    shapes: &mut Shapes<'_, 'py, N>,
    values: &[Value; N],
) -> PyResult<()> {
    let op = given.op;
    for i in op.sets.made {
        let arg = &op.args[i];
        let object = given.values[i].as_ref().filter(|object| !object.is_none());
        let array = match (arg.role, object) {
            (Role::Write(elem), Some(object)) => {
                let array = call.output(arg.name, elem, object)?;
                shapes.expect(call, i, &array)?;
                array
            }
            (Role::Write(elem), None) => {
                if let Some(number) = arg.named.reads_unless
                    && values[number].number() != 0.0
                {
                    let (name, x) = (op.args[number].name, values[number].number());
                    let text = format_args!("`{name}` is {x}, which needs a `{}` to add to", arg.name);
                    return Err(call.invalid(text));
                }
                let mut room = None;
                let shape = shapes.shape(call, i, &mut room)?;
                match arg.fill {
                    Some(fill) => call.filled(elem, shape, std::iter::repeat(fill))?,
                    None => call.made(elem, shape)?,
                }
            }
            (Role::Read(Elem::U64), None) => {
                let mut room = None;
                let shape = shapes.shape(call, i, &mut room)?;
                let state = RandomState::new();
                call.filled(Elem::U64, shape, (0_u64..).map(|i| state.hash_one(i)))?
            }
            _ => continue,
        };
        shapes.arrays[i] = Some(array);
    }
    Ok(())
}

/// What is written, or what is updated where nothing else is written.
fn results<const N: usize>(py: Python<'_>, op: &Op, shapes: &mut Shapes<'_, '_, N>) -> PyResult<Py<PyAny>> {
    let mut written = op.sets.writes.into_iter().filter_map(|i| shapes.arrays[i].take());
    match (written.next(), written.next()) {
        (Some(one), None) => Ok(one.object().unbind()),
        (Some(one), two) => {
            let all: Vec<_> = [one].into_iter().chain(two).chain(written).map(NumpyArray::object).collect();
            Ok(PyTuple::new(py, all)?.into_any().unbind())
        }
        (None, _) => {
            let updated = op.args.iter().position(|arg| arg.role == Role::Update);
            let array = updated.and_then(|i| shapes.arrays[i].take());
            Ok(array.map_or_else(|| py.None(), |array| array.object().unbind()))
        }
    }
}
