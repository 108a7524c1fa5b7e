//! The Python functions of the table of ops: one binding for all. Arguments are in the order of the C functions, or keywords;
//! sizes may be left out where arrays tell them, and an output that is `None` is made.

mod arguments;
mod shapes;

use crate::array::{NumpyArray, NumpyCall, Placed};
use crate::error;
use arguments::{Given, Spec};
use ironhorse::ops::spec::{Bound as Limit, Default, Elem, Op, Role, Value};
use ironhorse::ops::{self, OpError, layers, text};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};
use shapes::Shapes;
use std::ffi::CString;
use std::hash::{BuildHasher, RandomState};

/// Whether ops can run on a CUDA device here.
#[pyfunction]
fn cuda_available() -> bool {
    ops::cuda_available()
}

/// Adds the functions to the module: those of layers by name, and those for users as the dictionary `OPS`.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cuda_available, module)?)?;
    let all = PyDict::new(module.py());
    for op in ops::table::ALL {
        if let Some(name) = op.python_name() {
            all.set_item(name, function(module.py(), op, name)?)?;
        }
    }
    module.add("OPS", all)?;
    for op in layers::table::ALL.iter().filter(|op| op.python_name().is_some()) {
        module.add(op.symbol, function(module.py(), op, op.symbol)?)?;
    }
    Ok(())
}

/// The Python function of an op, with its signature and documentation.
fn function<'py>(py: Python<'py>, op: &'static Op, name: &str) -> PyResult<Bound<'py, PyCFunction>> {
    let doc = format!("{name}{}\n--\n\n{}", text::python_signature(op), text::python_doc(op));
    // A function lives as long as the process.
    let (name, doc) = (CString::new(name)?.into_boxed_c_str(), CString::new(doc)?.into_boxed_c_str());
    let spec = Spec::new(op);
    // The room for the arguments of a call is cleared each time: small ops have little of it.
    let call = match op.args.len() {
        0..=4 => call::<4>,
        5..=8 => call::<8>,
        _ => call::<16>,
    };
    PyCFunction::new_closure(py, Some(Box::leak(name)), Some(Box::leak(doc)), move |args, keywords| {
        call(&spec, args, keywords)
    })
}

/// The values of a call, to take along into work without the interpreter's lock.
struct Values<const N: usize>([Value; N]);

// SAFETY: the pointers are used by one call, in the thread that made it or in threads it waits for.
unsafe impl<const N: usize> Send for Values<N> {}
// SAFETY: as for Send.
unsafe impl<const N: usize> Sync for Values<N> {}

/// A call of an op of at most N arguments.
fn call<'py, const N: usize>(
    spec: &Spec,
    args: &Bound<'py, PyTuple>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let given = spec.parse::<N>(args, keywords)?;
    let op = given.op;
    let device = given.device.as_ref().map_or(Ok("auto"), |device| device.to_str())?;
    let mut call = NumpyCall::new(py, op.name, device)?;
    let mut shapes = Shapes::new(op);
    let mut copies = Vec::new();
    scalars(&call, &given, &mut shapes)?;
    for (i, arg) in op.args.iter().enumerate() {
        let array = match (arg.role, &given.values[i]) {
            (Role::Read(_), Some(object)) if arg.default == Default::Seeds && object.is_none() => continue,
            (Role::Read(elem), Some(object)) => call.input(arg.name, elem, object)?,
            (Role::Update, Some(object)) => call.output(arg.name, Elem::F32, object)?,
            (Role::Unused, Some(object)) if !object.is_none() => call.output(arg.name, Elem::F32, object)?,
            _ => continue,
        };
        if arg.below.is_some() {
            copies.push(call.private(&array));
        }
        shapes.arrays[i] = Some(array);
    }
    shapes.solve(&call, &given)?;
    let mut values = Values([Value::Pointer(std::ptr::null_mut()); N]);
    fill(&mut values.0, &given, &shapes)?;
    let count = op.args.len();
    let makes = |i: usize| given.values[i].as_ref().is_none_or(|value| value.is_none());
    if op.args.iter().enumerate().any(|(i, arg)| matches!(arg.role, Role::Write(_)) && makes(i)) {
        // Before memory of these sizes is allocated; `Op::call` checks all the same.
        op.check_scalars(&values.0[..count]).map_err(|error| error::of_op(py, &error))?;
    }
    outputs(&mut call, &given, &mut shapes, &values.0)?;
    let mut slots = [usize::MAX; N];
    let used =
        op.args.iter().zip(&shapes.arrays).enumerate().filter(|(_, (arg, _))| arg.role.elem().is_some());
    for (i, array) in used.filter_map(|(i, (_, array))| Some((i, array.as_ref()?))) {
        slots[i] = array.slot();
        values.0[i] = Value::Pointer(call.address(array.slot()));
    }
    if call.on_gpu() {
        // SAFETY: host arrays of the sizes of the values; overlaps must be seen before they are copied apart.
        unsafe { op.check(&values.0[..count]) }.map_err(|error| error::of_op(py, &error))?;
    }
    call.run(shapes.work(), |on| run(op, &mut values, &slots, on))?;
    drop(copies);
    results(py, op, &mut shapes)
}

fn run<const N: usize>(
    op: &'static Op,
    values: &mut Values<N>,
    slots: &[usize; N],
    on: &Placed,
) -> Result<(), OpError> {
    for (value, &slot) in values.0.iter_mut().zip(slots) {
        if slot != usize::MAX {
            *value = Value::Pointer(on.address(slot));
        }
    }
    // SAFETY: `Shapes` saw that every array has as many elements as the sizes say; the caller holds the arrays, and another
    // thread that writes one meanwhile can change numbers only: indices are private copies.
    unsafe { op.call(&values.0[..op.args.len()], on.stream) }
}

/// Takes the sizes that are given.
fn scalars<const N: usize>(
    call: &NumpyCall<'_>,
    given: &Given<'_, '_, N>,
    shapes: &mut Shapes<'_, N>,
) -> PyResult<()> {
    for (i, arg) in given.op.args.iter().enumerate().filter(|(_, arg)| arg.role.is_size()) {
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
    shapes: &Shapes<'_, N>,
) -> PyResult<()> {
    let op = given.op;
    let size = |name: &str| op.position(name).map_or(1, |i| shapes.size(i)).max(1);
    for (i, arg) in op.args.iter().enumerate() {
        let object =
            given.values[i].as_ref().filter(|object| !object.is_none() || arg.default == Default::Absent);
        values[i] = match (arg.role, object, arg.default) {
            (Role::Size | Role::Count, ..) => Value::Int(shapes.size(i)),
            (Role::Double, Some(object), _) => Value::Number(object.extract()?),
            (Role::Double, None, Default::Number(x)) => Value::Number(x),
            (Role::Number, Some(object), _) => Value::from(object.extract::<f32>()?),
            (Role::Number, None, Default::InverseRoot(name)) => Value::from(1.0 / (size(name) as f32).sqrt()),
            (Role::Number, None, Default::Inverse(name)) => Value::from(1.0 / size(name) as f32),
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
    shapes: &mut Shapes<'py, N>,
    values: &[Value; N],
) -> PyResult<()> {
    let op = given.op;
    for (i, arg) in op.args.iter().enumerate() {
        let object = given.values[i].as_ref().filter(|object| !object.is_none());
        let array = match (arg.role, object) {
            (Role::Write(elem), Some(object)) => {
                let array = call.output(arg.name, elem, object)?;
                shapes.expect(call, i, &array)?;
                array
            }
            (Role::Write(elem), None) => {
                if let Some(number) = arg.reads_unless.and_then(|name| op.position(name))
                    && values[number].number() != 0.0
                {
                    let (name, x) = (op.args[number].name, values[number].number());
                    let text = format_args!("`{name}` is {x}, which needs a `{}` to add to", arg.name);
                    return Err(call.invalid(text));
                }
                let shape = shapes.shape(call, i)?;
                match arg.fill {
                    Some(fill) => call.filled(elem, &shape, std::iter::repeat(fill))?,
                    None => call.made(elem, &shape)?,
                }
            }
            (Role::Read(Elem::U64), None) => {
                let shape = shapes.shape(call, i)?;
                let state = RandomState::new();
                call.filled(Elem::U64, &shape, (0_u64..).map(|i| state.hash_one(i)))?
            }
            _ => continue,
        };
        shapes.arrays[i] = Some(array);
    }
    Ok(())
}

/// What is written, or what is updated where nothing else is written.
fn results<const N: usize>(py: Python<'_>, op: &Op, shapes: &mut Shapes<'_, N>) -> PyResult<Py<PyAny>> {
    let writes = op.args.iter().any(|arg| matches!(arg.role, Role::Write(_)));
    let returned = |role| if writes { matches!(role, Role::Write(_)) } else { role == Role::Update };
    let args = op.args.iter().zip(&mut shapes.arrays);
    let mut made = args.filter(|(arg, _)| returned(arg.role)).filter_map(|(_, array)| array.take());
    match (made.next(), if writes { made.next() } else { None }) {
        (Some(one), None) => Ok(one.object().unbind()),
        (one, two) => {
            let all: Vec<_> = one.into_iter().chain(two).chain(made).map(NumpyArray::object).collect();
            Ok(PyTuple::new(py, all)?.into_any().unbind())
        }
    }
}
