//! Reading kernels out of CUDA source: names, template parameters, and the types of their arguments. Not a compiler: it knows
//! comments, strings, macros without arguments, `typedef` and `using`, namespaces and `extern "C"`, and leaves the rest.

use super::tokens::{DEPTH, Names, Token, expand, is_word, join, tokens};

/// A kernel as its source declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The name with its namespaces.
    pub name: String,
    /// The line of its text, from 1; 0 for one of a header.
    pub line: u32,
    /// Whether the name in the code is the name in the text.
    pub c_linkage: bool,
    /// Its template parameters, in order; empty if it is not a template.
    pub template: Vec<TemplateParameter>,
    /// Its arguments, in order.
    pub parameters: Vec<Parameter>,
}

/// A template parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateParameter {
    /// `class` for a type, else the type of the value.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// What it is where it is not given; empty for none.
    pub default: String,
}

/// An argument of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name; empty where it has none.
    pub name: String,
    /// Its type without stars and qualifiers, aliases resolved: `float`, `unsigned long long`, `T`.
    pub base: String,
    /// How many stars.
    pub pointers: u32,
    /// Whether what it points to is const.
    pub constant: bool,
}

const QUALIFIERS: [&str; 9] = [
    "const",
    "volatile",
    "struct",
    "typename",
    "__restrict__",
    "__restrict",
    "restrict",
    "__grid_constant__",
    "class",
];
const BUILT_IN: [&str; 10] =
    ["void", "bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned"];

/// The kernels of a text and of its headers; where two differ under one name, both are there.
pub(super) fn read(text: &str, headers: &[&str], flags: &[String]) -> Vec<Signature> {
    let mut macros = Names::new();
    for flag in flags {
        let given = flag.strip_prefix("--define-macro=").or_else(|| flag.strip_prefix("-D"));
        if let Some(given) = given {
            let (name, value) = given.split_once('=').unwrap_or((given, "1"));
            macros.insert(name.trim().to_owned(), tokens(value, &mut Names::new()));
        }
    }
    let headers: Vec<Vec<Token>> = headers.iter().map(|header| tokens(header, &mut macros)).collect();
    let mut main = tokens(text, &mut macros);
    let mut all = Vec::new();
    for mut header in headers {
        header.iter_mut().for_each(|token| token.line = 0);
        all.push(expand(&header, &macros));
    }
    main = expand(&main, &macros);
    let mut aliases = Names::new();
    for tokens in all.iter().chain([&main]) {
        collect_aliases(tokens, &mut aliases);
    }
    all.insert(0, main);
    let mut found: Vec<Signature> = Vec::new();
    for signature in all.iter().flat_map(|tokens| kernels(tokens, &aliases)) {
        let known = found.iter().any(|other| {
            (&other.name, &other.template, other.types())
                == (&signature.name, &signature.template, signature.types())
        });
        if !known {
            found.push(signature);
        }
    }
    found
}

impl Signature {
    fn types(&self) -> Vec<(&str, u32, bool)> {
        self.parameters.iter().map(|p| (p.base.as_str(), p.pointers, p.constant)).collect()
    }
}

/// `typedef type name;` and `using name = type;`
fn collect_aliases(tokens: &[Token], aliases: &mut Names) {
    for (i, token) in tokens.iter().enumerate() {
        let rest = &tokens[i + 1..];
        let Some(end) = rest.iter().position(|token| matches!(token.text.as_str(), ";" | "{" | "(" | "["))
        else {
            return;
        };
        if rest[end].text != ";" {
            continue;
        }
        let of_template = i > 0 && tokens[i - 1].text == ">";
        match (token.text.as_str(), &rest[..end]) {
            ("typedef", [kind @ .., name]) if !kind.is_empty() => {
                aliases.insert(name.text.clone(), kind.to_vec());
            }
            ("using", [name, equals, kind @ ..]) if equals.text == "=" && !of_template => {
                aliases.insert(name.text.clone(), kind.to_vec());
            }
            _ => {}
        }
    }
}

enum Scope {
    Namespace(String),
    Linkage,
    Other,
}

fn kernels(tokens: &[Token], aliases: &Names) -> Vec<Signature> {
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    let mut found = Vec::new();
    let mut scopes: Vec<Scope> = Vec::new();
    let mut start = 0; // of the declaration
    let mut i = 0;
    while i < tokens.len() {
        match text(i) {
            "{" => {
                let before = &tokens[start..i];
                let words = || before.iter().map(|token| token.text.as_str());
                let scope = match words().position(|word| word == "namespace") {
                    Some(at) => Scope::Namespace(words().skip(at + 1).collect()),
                    None if words().eq(["extern", "\"C\""]) => Scope::Linkage,
                    None => Scope::Other,
                };
                scopes.push(scope);
                start = i + 1;
            }
            "}" => {
                scopes.pop();
                start = i + 1;
            }
            ";" => start = i + 1,
            "__global__" => {
                if let Some((mut signature, end)) = kernel(tokens, start, i, aliases) {
                    for scope in scopes.iter().rev() {
                        match scope {
                            Scope::Namespace(name) if !name.is_empty() => {
                                signature.name = format!("{name}::{}", signature.name);
                            }
                            Scope::Linkage => signature.c_linkage = true,
                            _ => {}
                        }
                    }
                    found.push(signature);
                    i = end;
                }
            }
            _ => {}
        }
        i += 1;
    }
    found
}

/// The kernel whose declaration starts at `start` and has `__global__` at `at`; and where its arguments end.
fn kernel(tokens: &[Token], start: usize, at: usize, aliases: &Names) -> Option<(Signature, usize)> {
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    let mut c_linkage = tokens[start..at].iter().any(|token| token.text == "\"C\"");
    let template = match tokens[start..at].iter().position(|token| token.text == "template") {
        Some(keyword) if text(start + keyword + 1) == "<" => {
            let open = start + keyword + 1;
            template_parameters(&tokens[open + 1..close(tokens, open)?])
        }
        _ => Vec::new(),
    };
    let mut i = at + 1;
    loop {
        match text(i) {
            "" => return None,
            "[" => i = close(tokens, i)? + 1,
            "\"C\"" => {
                c_linkage = true;
                i += 1;
            }
            word if text(i + 1) == "(" => {
                let end = close(tokens, i + 1)?;
                let attribute = word.starts_with("__") && text(end + 1) != "{" && text(end + 1) != ";";
                if attribute {
                    i = end + 1;
                    continue;
                }
                let generic: Vec<&str> =
                    template.iter().map(|p: &TemplateParameter| p.name.as_str()).collect();
                let parameters = split(&tokens[i + 2..end])
                    .into_iter()
                    .filter(|part| !matches!(part, [] | [Token { .. }] if part.iter().all(|token| token.text == "void")))
                    .map(|part| parameter(part, aliases, &generic))
                    .collect();
                let (name, line) = (word.to_owned(), tokens[i].line);
                return Some((Signature { name, line, c_linkage, template, parameters }, end));
            }
            _ if matches!(text(i + 1), "<" | ";" | "{" | "=") => return None, // a specialisation, or not a function
            _ => i += 1,
        }
    }
}

/// The index of the token that closes the bracket at `open`.
fn close(tokens: &[Token], open: usize) -> Option<usize> {
    let (mut depth, mut round) = (0_i32, 0_i32);
    let angle = tokens[open].text == "<";
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "(" | "[" | "{" => round += 1,
            ")" | "]" | "}" => round -= 1,
            "<" if angle && round == 0 => depth += 1,
            ">" if angle && round == 0 => depth -= 1,
            _ => {}
        }
        if depth + round == 0 {
            return Some(i);
        }
    }
    None
}

/// The parts between commas that are in no brackets.
fn split(tokens: &[Token]) -> Vec<&[Token]> {
    let mut parts = Vec::new();
    let (mut round, mut angle, mut start) = (0, 0, 0);
    for (i, token) in tokens.iter().enumerate() {
        match token.text.as_str() {
            "(" | "[" | "{" => round += 1,
            ")" | "]" | "}" => round -= 1,
            "<" if round == 0 => angle += 1,
            ">" if round == 0 => angle -= 1,
            "," if round == 0 && angle == 0 => {
                parts.push(&tokens[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(&tokens[start..]);
    parts
}

fn template_parameters(tokens: &[Token]) -> Vec<TemplateParameter> {
    let parts = split(tokens).into_iter().filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let equals = part.iter().position(|token| token.text == "=");
            let (declared, default) = match equals {
                Some(at) => (&part[..at], join(&part[at + 1..])),
                None => (part, String::new()),
            };
            let (name, kind) = match declared {
                [kind @ .., name] if !kind.is_empty() => (name.text.clone(), join(kind)),
                kind => (String::new(), join(kind)),
            };
            let kind = if matches!(kind.as_str(), "class" | "typename") { "class".into() } else { kind };
            TemplateParameter { kind, name, default }
        })
        .collect()
}

fn parameter(tokens: &[Token], aliases: &Names, generic: &[&str]) -> Parameter {
    let declared = tokens.split(|token| token.text == "=").next().unwrap_or(tokens);
    let (declared, arrays) = match declared.iter().position(|token| token.text == "[") {
        Some(at) => (&declared[..at], declared[at..].iter().filter(|token| token.text == "[").count() as u32),
        None => (declared, 0),
    };
    let named = match declared {
        [kind @ .., last] if is_word(last) => {
            let types = kind.iter().any(|token| is_word(token) && !QUALIFIERS.contains(&token.text.as_str()));
            let word = last.text.as_str();
            types && !BUILT_IN.contains(&word) && !QUALIFIERS.contains(&word) && !ends_scope(kind)
        }
        _ => false,
    };
    let (kind, name) = match declared {
        [kind @ .., last] if named => (kind, last.text.clone()),
        kind => (kind, String::new()),
    };
    let mut out = Parameter { name, base: String::new(), pointers: arrays, constant: false };
    kind_of(kind, aliases, generic, &mut out, DEPTH);
    out
}

/// Whether a type goes on after these tokens: `std ::`
fn ends_scope(tokens: &[Token]) -> bool {
    tokens.last().is_some_and(|token| token.text == ":")
}

fn kind_of(tokens: &[Token], aliases: &Names, generic: &[&str], out: &mut Parameter, depth: usize) {
    let star = tokens.iter().position(|token| token.text == "*").unwrap_or(tokens.len());
    let (before, after) = tokens.split_at(star);
    out.pointers += after.iter().filter(|token| token.text == "*").count() as u32;
    out.constant |= before.iter().any(|token| token.text == "const");
    let plain: Vec<Token> =
        before.iter().filter(|token| !QUALIFIERS.contains(&token.text.as_str())).cloned().collect();
    let odd: String =
        after.iter().filter(|t| matches!(t.text.as_str(), "&" | "(")).map(|t| &*t.text).collect();
    let base = join(&plain);
    match aliases.get(&base) {
        Some(kind) if depth > 0 && odd.is_empty() && !generic.contains(&base.as_str()) => {
            kind_of(kind, aliases, generic, out, depth - 1);
        }
        _ => out.base = base + &odd,
    }
}

#[cfg(test)]
#[path = "signature_tests.rs"]
mod tests;
