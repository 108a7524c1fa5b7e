//! Texts made of the table: the op section of `ironhorse.h`, and the signatures, documentation and types of the Python
//! functions.

use super::spec::{Arg, Default, Dim, Elem, Op, Python, Role};
use std::fmt::Write;

/// Columns of a line of the C header.
const C_WIDTH: usize = 110;
/// Columns of a line of Python.
const PYTHON_WIDTH: usize = 116;

/// Cuts words into lines of at most `width` characters, each after `indent`.
fn wrap(text: &str, width: usize, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].len() + 1 + word.len() + indent.len() > width {
            lines.push(word.to_owned());
        } else {
            let gap = if lines[last].is_empty() { "" } else { " " };
            lines[last] = format!("{}{gap}{word}", lines[last]);
        }
    }
    lines.iter().map(|line| format!("{indent}{line}")).collect::<Vec<_>>().join("\n")
}

/// The shape of an array in words: `[rows, dim]`.
pub fn shape(op: &Op, arg: &Arg) -> String {
    let name = |i: usize| op.args[i].name;
    let side = |dim: &Dim| match *dim {
        Dim::Size(i) => name(i).to_owned(),
        Dim::Half(i) => format!("{} / 2", name(i)),
        Dim::Times(i, j) => format!("{} * {}", name(i), name(j)),
        Dim::AtLeast(i, j) => format!("at least {} + {}", name(i), name(j)),
        Dim::Above(i) => format!("more than the largest {}", name(i)),
    };
    format!("[{}]", arg.dims.iter().map(side).collect::<Vec<_>>().join(", "))
}

fn listed(names: &[&str], word: &str) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(word)
}

/// The prototypes of all C functions, with comments.
pub fn c_section(ops: &[&Op]) -> String {
    let mut text = String::new();
    for op in ops {
        let comment = wrap(op.doc, C_WIDTH, " ");
        let arrays = wrap(&c_arrays(op), C_WIDTH, " ");
        // Writing to a String cannot fail.
        let _ = write!(text, "/*\n{comment}\n\n{arrays}\n */\n{}\n", c_prototype(op));
    }
    text
}

fn c_arrays(op: &Op) -> String {
    let mut sentences = Vec::new();
    for (what, written) in [("Read:", false), ("Written:", true)] {
        let arrays: Vec<_> = op.args.iter().filter(|arg| arg.role.elem().is_some()).collect();
        let arrays: Vec<_> = arrays.iter().filter(|arg| arg.role.written() == written).collect();
        let describe = |arg: &&&Arg| {
            let same = if arg.same.is_empty() {
                String::new()
            } else {
                format!(" (may be {})", listed(arg.same, " or "))
            };
            let index = match arg.below {
                Some("") => ", at least 0".into(),
                Some(size) => format!(", each in 0..{size}"),
                None => String::new(),
            };
            let shape = shape(op, arg);
            format!("`{}` {}{index}{same}", arg.name, if shape == "[]" { "[1]".into() } else { shape })
        };
        if !arrays.is_empty() {
            let list: Vec<_> = arrays.iter().map(describe).collect();
            sentences.push(format!("{what} {}.", list.join(", ")));
        }
    }
    for arg in op.args.iter().filter(|arg| !arg.bound.text().is_empty()) {
        sentences.push(format!("`{}` is {}.", arg.name, arg.bound.text()));
    }
    sentences.join(" ")
}

fn c_prototype(op: &Op) -> String {
    let parameter = |arg: &Arg| {
        let kind = match arg.role {
            Role::Read(Elem::F32) => "const float *",
            Role::Read(Elem::I32) => "const int32_t *",
            Role::Read(Elem::U64) => "const uint64_t *",
            Role::Write(Elem::I32) => "int32_t *",
            Role::Write(_) | Role::Update | Role::Unused => "float *",
            Role::Count => "int64_t ",
            Role::Size | Role::Int | Role::Flag => "int ",
            Role::Number | Role::Double => "float ",
        };
        format!("{kind}{}", arg.name)
    };
    let mut parameters: Vec<_> = op.args.iter().map(parameter).collect();
    parameters.push("void *stream".into());
    let start = format!("int32_t {}(", op.symbol);
    let line = format!("{start}{});", parameters.join(", "));
    if line.len() <= C_WIDTH {
        return format!("{line}\n");
    }
    format!("{start}{});\n", parameters.join(&format!(",\n{}", " ".repeat(start.len()))))
}

/// Whether Python has the argument.
pub fn in_python(arg: &Arg) -> bool {
    let hidden_count = arg.role == Role::Count && !arg.first;
    !hidden_count && !matches!(arg.default, Default::Hidden(_))
}

/// Whether Python must be given the argument.
pub fn required(arg: &Arg) -> bool {
    match arg.default {
        Default::Required => true,
        Default::Absent => !matches!(arg.role, Role::Write(_) | Role::Unused | Role::Size | Role::Count),
        _ => false,
    }
}

fn default_text(arg: &Arg) -> String {
    match arg.default {
        Default::Number(x) => format!("{x:?}"),
        Default::Int(x) => x.to_string(),
        Default::Flag(x) => if x { "True" } else { "False" }.into(),
        _ => "None".into(),
    }
}

/// The keyword-only arguments of the Python function, with type and default.
fn keywords(op: &Op) -> Vec<(&'static str, &'static str, &'static str)> {
    let mut keywords = Vec::new();
    if let Python::Switch(flag, _) = op.python {
        keywords.push((flag, "bool", "False"));
    }
    keywords.extend(op.args.iter().filter_map(|arg| arg.alias).map(|name| (name, "float | None", "None")));
    keywords.push(("device", "str", "\"auto\""));
    keywords
}

/// The signature as Python's `inspect` reads it.
pub fn python_signature(op: &Op) -> String {
    let mut parts = Vec::new();
    let mut optional = false;
    for arg in op.args.iter().filter(|arg| in_python(arg)) {
        optional |= !required(arg);
        parts.push(if optional {
            format!("{}={}", arg.name, default_text(arg))
        } else {
            arg.name.to_owned()
        });
    }
    parts.push("*".into());
    parts.extend(keywords(op).iter().map(|(name, _, default)| format!("{name}={default}")));
    format!("({})", parts.join(", "))
}

/// The names of what the Python function returns.
pub fn results(op: &Op) -> Vec<&'static Arg> {
    let written: Vec<_> = op.args.iter().filter(|arg| matches!(arg.role, Role::Write(_))).collect();
    if written.is_empty() {
        op.args.iter().filter(|arg| arg.role == Role::Update).take(1).collect()
    } else {
        written
    }
}

fn numpy(role: Role) -> &'static str {
    match role.elem() {
        Some(Elem::I32) => "int32",
        Some(Elem::U64) => "uint64",
        _ => "float32",
    }
}

/// The documentation of the Python function.
pub fn python_doc(op: &Op) -> String {
    let mut text = wrap(op.doc, PYTHON_WIDTH, "");
    text.push_str("\n\nArguments:\n");
    let mut sizes = Vec::new();
    for arg in op.args.iter().filter(|arg| in_python(arg)) {
        if arg.role.is_size() && arg.solved() && !arg.first {
            sizes.push(arg.name);
            continue;
        }
        let line = format!("{}: {}", arg.name, argument(op, arg));
        let _ = writeln!(text, "{}", wrap(&line, PYTHON_WIDTH, "    "));
    }
    if !sizes.is_empty() {
        let leading = op.args.iter().find(|arg| arg.leading && in_python(arg));
        let leading = leading.map_or(String::new(), |arg| {
            format!("; `{}` stands for any number of leading dimensions", arg.name)
        });
        let line =
            format!("{}: sizes; without them, the shapes of the arrays tell{leading}", sizes.join(", "));
        let _ = writeln!(text, "{}", wrap(&line, PYTHON_WIDTH, "    "));
    }
    if let Python::Switch(flag, other) = op.python {
        let _ = writeln!(text, "{}", wrap(&format!("{flag}: {}", other.doc), PYTHON_WIDTH, "    "));
    }
    text.push_str("    device: where to compute, \"auto\" (the CPU), \"cpu\", \"cuda\" or \"cuda:N\"\n");
    let names: Vec<_> = results(op).iter().map(|arg| arg.name).collect();
    let list = if names.len() == 1 { names[0].to_owned() } else { format!("({})", names.join(", ")) };
    let _ = write!(text, "\nReturns: {list}\n\nExample:\n    {}\n", example(op));
    text
}

fn argument(op: &Op, arg: &Arg) -> String {
    let mut parts = Vec::new();
    match arg.role {
        Role::Unused => parts.push("not used, may be None".into()),
        Role::Number | Role::Double | Role::Int => parts.push("number".into()),
        Role::Flag => parts.push("flag".into()),
        Role::Size | Role::Count if arg.first => {
            parts.push("if given, only the first n elements of the arrays are used".into());
        }
        Role::Size | Role::Count => parts.push("size".into()),
        Role::Read(_) | Role::Write(_) | Role::Update => {
            parts.push(format!("{} {}", numpy(arg.role), shape(op, arg)));
        }
    }
    match arg.role {
        Role::Write(_) => parts.push("written; a new array if None".into()),
        Role::Update => parts.push("read and written".into()),
        _ => {}
    }
    if !arg.same.is_empty() {
        parts.push(format!("may be {}", listed(arg.same, " or ")));
    }
    if let Some(size) = arg.below {
        parts.push(format!("each in 0..{size}"));
    }
    if let Some(number) = arg.reads_unless {
        parts.push(format!("must be given unless `{number}` is 0"));
    }
    if !arg.bound.text().is_empty() && !arg.role.is_size() || arg.default == Default::Required {
        parts.push(arg.bound.text());
    }
    match arg.default {
        Default::InverseRoot(size) => parts.push(format!("1 / sqrt({size}) if None")),
        Default::Inverse(size) => parts.push(format!("1 / {size} if None")),
        Default::Seeds => parts.push("random if None".into()),
        _ => {}
    }
    if let Some(alias) = arg.alias {
        parts.push(format!("`{alias}` is another name"));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(", ")
}

/// A call that runs: every size is 4, and what else must be given is 2.
fn example(op: &Op) -> String {
    let side = |dim: &Dim| if matches!(dim, Dim::Half(_)) { "2" } else { "4" };
    let mut given = Vec::new();
    let mut skipped = false;
    for arg in op.args.iter().filter(|arg| in_python(arg)) {
        if !required(arg) {
            skipped = true;
            continue;
        }
        let mut text = match arg.role.elem() {
            Some(_) => {
                let sides: Vec<_> =
                    if arg.dims.is_empty() { vec!["1"] } else { arg.dims.iter().map(side).collect() };
                let make = if arg.below.is_some() { "zeros" } else { "ones" };
                let shape =
                    if sides.len() == 1 { sides[0].to_owned() } else { format!("({})", sides.join(", ")) };
                format!("np.{make}({shape}, np.{})", numpy(arg.role))
            }
            None => if arg.role == Role::Number { "0.5" } else { "2" }.to_owned(),
        };
        if skipped {
            text = format!("{}={text}", arg.name);
        }
        given.push(text);
    }
    format!("ops.{}({})", op.python_name().unwrap_or(op.symbol), given.join(", "))
}

/// `ironhorse/ops/__init__.pyi` without its head: a typed signature for every function.
pub fn python_stub(ops: &[&Op]) -> String {
    let mut text = String::new();
    for op in ops {
        let Some(name) = op.python_name() else { continue };
        // `scale(x, 2.0)` for `scale(x, None, 2.0)`: what must be given may follow the inputs directly.
        let args: Vec<_> = op.args.iter().filter(|arg| in_python(arg)).collect();
        let first_optional = args.iter().position(|arg| !required(arg)).unwrap_or(args.len());
        let short = args[first_optional..].iter().any(|arg| required(arg));
        let returns: Vec<_> = results(op).iter().map(|arg| array_type(arg.role)).collect();
        let returns =
            if returns.len() == 1 { returns[0].to_owned() } else { format!("tuple[{}]", returns.join(", ")) };
        let mut signature = |parts: Vec<String>| {
            let overload = if short { "@overload\n" } else { "" };
            let line = format!("def {name}({}) -> {returns}: ...", parts.join(", "));
            if line.len() <= 120 {
                let _ = writeln!(text, "{overload}{line}");
            } else {
                let _ = writeln!(
                    text,
                    "{overload}def {name}(\n    {},\n) -> {returns}: ...",
                    parts.join(",\n    ")
                );
            }
        };
        let keywords: Vec<_> =
            keywords(op).iter().map(|(name, kind, default)| format!("{name}: {kind} = {default}")).collect();
        if short {
            let must = args.iter().filter(|arg| required(arg));
            let mut parts: Vec<_> = must.map(|arg| format!("{}: {}", arg.name, python_type(arg))).collect();
            parts.push("/".into());
            parts.push("*".into());
            let numbers = args.iter().filter(|arg| matches!(arg.default, Default::Number(_)));
            parts.extend(numbers.map(|arg| format!("{}: float = {}", arg.name, default_text(arg))));
            parts.extend(keywords.clone());
            signature(parts);
        }
        let mut parts = Vec::new();
        for (i, arg) in args.iter().enumerate() {
            let (mut kind, mut default) = (python_type(arg), String::new());
            if i >= first_optional {
                default = format!(" = {}", default_text(arg));
                if default_text(arg) == "None" && !kind.ends_with("None") {
                    kind.push_str(" | None");
                }
            }
            parts.push(format!("{}: {kind}{default}", arg.name));
        }
        parts.push("*".into());
        parts.extend(keywords);
        signature(parts);
        if let Some(also) = op.also {
            let _ = writeln!(text, "\n{also} = {name}\n"); // as ruff formats it
        }
    }
    text
}

fn array_type(role: Role) -> &'static str {
    match role.elem() {
        Some(Elem::I32) => "I32",
        Some(Elem::U64) => "U64",
        _ => "F32",
    }
}

fn python_type(arg: &Arg) -> String {
    match arg.role {
        Role::Number | Role::Double => "float",
        Role::Flag => "bool",
        Role::Size | Role::Count | Role::Int => "int",
        array => array_type(array),
    }
    .to_owned()
}
