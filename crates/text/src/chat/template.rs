//! Chat templates, rendered as transformers renders them: Jinja with trimmed blocks, loop controls, the methods of Python's
//! strings and dictionaries, `raise_exception`, `strftime_now` and its own `tojson`.

use std::ops::Range;
use std::path::Path;

use minijinja::value::Serde;
use minijinja::{Environment, Error as JinjaError, ErrorKind, Value as JinjaValue};
use serde_json::{Map, Value};

use super::generation::{self, CLOSE, FILTER, OPEN};
use super::python;
use crate::tokenizer::TEMPLATE_NAME;
use crate::{Error, Result};

/// Its name in `tokenizer_config.json`.
const FIELD: &str = "chat_template";
/// The name within the engine.
const NAME: &str = "chat";
/// Steps that a rendering may take: templates are programs out of foreign folders, and one that never ends must not hold a
/// run. A conversation of 10,000 messages takes about a twentieth of this.
const MOST_STEPS: u64 = 20_000_000;

/// A chat template.
pub struct Template {
    jinja: Environment<'static>,
    /// What errors call the source of the template.
    origin: String,
    /// Whether it marks what the assistant says with `{% generation %}`.
    marks: bool,
}

/// A conversation as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// What was between `{% generation %}` and `{% endgeneration %}`, in bytes.
    pub spans: Vec<Range<usize>>,
}

impl Template {
    /// A template of this text; `origin` is what errors call it.
    pub fn new(source: &str, origin: &str) -> Result<Self> {
        Self::limited(source, origin, MOST_STEPS)
    }

    fn limited(source: &str, origin: &str, most_steps: u64) -> Result<Self> {
        let (source, marks) = generation::rewrite(source);
        let mut jinja = Environment::new();
        jinja.set_debug(true); // for the expression in errors
        let syntax = jinja.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
        jinja.set_syntax(syntax.map_err(|error| refusal(origin, &error))?);
        jinja.set_fuel(Some(most_steps));
        jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        jinja.add_filter("tojson", python::to_json);
        jinja.add_filter(FILTER, |text: String| format!("{OPEN}{text}{CLOSE}"));
        jinja.add_function("strftime_now", python::strftime_now);
        jinja.add_function("raise_exception", |why: String| -> Result<JinjaValue, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, why))
        });
        let added = jinja.add_template_owned(NAME, source);
        added.map_err(|error| refusal(origin, &error))?;
        Ok(Self { jinja, origin: origin.to_owned(), marks })
    }

    /// The template in a file.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes =
            std::fs::read(path).map_err(|source| Error::io(path, "read the chat template", source))?;
        let text = String::from_utf8(bytes).map_err(|error| {
            Error::input(
                path,
                format!("is not UTF-8 at byte {}, expected a template", error.utf8_error().valid_up_to()),
            )
        })?;
        Self::new(&text, &path.display().to_string())
    }

    /// The template of a folder: `chat_template.jinja`, or `chat_template` of its `tokenizer_config.json`, given as `config`.
    pub fn beside(folder: &Path, config: &Value) -> Result<Option<Self>> {
        let file = folder.join(TEMPLATE_NAME);
        if file.is_file() {
            return Self::open(&file).map(Some);
        }
        let origin = folder.join(crate::tokenizer::CONFIG_NAME);
        let named = |list: &'_ Vec<Value>| {
            let default = list.iter().find(|entry| entry["name"] == "default").or(list.first());
            default.and_then(|entry| entry["template"].as_str()).map(str::to_owned)
        };
        let source = match &config[FIELD] {
            Value::Null => return Ok(None),
            Value::String(text) => Some(text.clone()),
            Value::Array(list) => named(list),
            _ => None,
        };
        let source = source.ok_or_else(|| {
            Error::input(&origin, format!("`{FIELD}` is neither a text nor a list of names and templates"))
        })?;
        Self::new(&source, &format!("{FIELD} of {}", origin.display())).map(Some)
    }

    /// Whether it marks what the assistant says.
    pub fn marks(&self) -> bool {
        self.marks
    }

    /// What errors call the source of the template.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Renders it with these names.
    pub fn render(&self, context: &Map<String, Value>) -> Result<Rendered> {
        let template = self.jinja.get_template(NAME).map_err(|error| refusal(&self.origin, &error))?;
        let context = JinjaValue::from(Serde(context));
        let marked = template.render(context).map_err(|error| refusal(&self.origin, &error))?;
        let (text, spans) = generation::take_marks(&marked);
        Ok(Rendered { text, spans })
    }
}

/// An error with the line and the expression it is in.
fn refusal(origin: &str, error: &JinjaError) -> Error {
    let problem = match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (ErrorKind::OutOfFuel, _) => "takes more steps than a template may".to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let expression = error.template_source().zip(error.range()).map(|(source, range)| around(source, range));
    Error::Template {
        origin: origin.to_owned(),
        line: error.line().unwrap_or(1),
        expression: expression.unwrap_or_default(),
        problem: crate::error::one_line(&problem),
    }
}

/// The tag that a range is in, without its delimiters; the range itself if the tag is long.
fn around(source: &str, range: Range<usize>) -> String {
    const MOST: usize = 100;
    let (Some(before), Some(within), Some(after)) =
        (source.get(..range.start), source.get(range.clone()), source.get(range.end..))
    else {
        return String::new();
    };
    let start = before.rfind("{{").max(before.rfind("{%")).map_or(range.start, |at| at + 2);
    let end = [after.find("}}"), after.find("%}")]
        .into_iter()
        .flatten()
        .min()
        .map_or(range.end, |at| range.end + at);
    let tag = source.get(start..end).unwrap_or(within).trim_matches(['-', '+']).trim();
    let shown = if tag.len() <= MOST && !tag.contains('\n') { tag } else { within.trim() };
    crate::error::one_line(shown.lines().next().unwrap_or_default())
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Template({})", self.origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, context: Value) -> Result<Rendered> {
        let Value::Object(context) = context else { panic!("{context} is no object") };
        Template::new(source, "t.jinja")?.render(&context)
    }

    fn text(source: &str, context: Value) -> String {
        render(source, context).unwrap().text
    }

    #[test]
    fn blocks_are_trimmed_as_by_transformers() {
        let source = "{% for m in messages %}\n  {% if m %}\n{{ m }}\n  {%- endif %}\n{% endfor %}\nend\n";
        assert_eq!(text(source, json!({"messages": ["a", "b"]})), "abend");
    }

    #[test]
    fn python_is_at_hand() {
        for (source, want) in [
            ("{{ ' a '.strip() + 'b'.upper() }}", "aB"),
            ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "b"),
            ("{{ x.startswith('a') and 'b' in x }}", "True"),
            ("{{ none }}|{{ missing }}|{{ missing is defined }}", "None||False"),
            ("{{ [1, 2, 3][::-1] | join(',') }}", "3,2,1"),
            ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "b=1;a=2;"),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "013",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
                "3",
            ),
            ("{{ d | tojson }}", r#"{"b": 1, "a": 2}"#),
            ("{{ d | tojson(indent=1) }}", "{\n \"b\": 1,\n \"a\": 2\n}"),
            ("{% macro f(a, b='y') %}{{ a }}{{ b }}{% endmacro %}{{ f('x') }}", "xy"),
            ("{{ d.get('z', 'none') }}{{ d['b'] }}{{ x is string }}{{ d is mapping }}", "none1TrueTrue"),
        ] {
            assert_eq!(text(source, json!({"x": "abc", "d": {"b": 1, "a": 2}})), want, "{source}");
        }
        assert_eq!(text("{{ strftime_now('%Y') }}", json!({})).len(), 4);
    }

    #[test]
    fn what_is_generated_is_told() {
        let source =
            "{% for m in messages %}<{% generation %}\n  {{- m }};\n{%- endgeneration %}>\n{% endfor %}";
        let found = render(source, json!({"messages": ["é", ""]})).unwrap();
        assert_eq!(found, Rendered { text: "<é;>\n<;>\n".into(), spans: vec![1..4, 7..8] });
        assert!(Template::new(source, "t").unwrap().marks());
    }

    #[test]
    fn errors_have_line_and_expression() {
        let refused = |source: &str| render(source, json!({"x": "a", "n": 1})).unwrap_err().to_string();
        for (source, want) in [
            (
                "\n{{ raise_exception('Roles must alternate') }}",
                "t.jinja: line 2: `raise_exception('Roles must alternate')`: Roles must alternate",
            ),
            ("a\nb {{ x.nothing() }}", "t.jinja: line 2: `x.nothing()`: "),
            ("{% if x %}\n", "t.jinja: line "),
            ("{% generation %}a", "t.jinja: line 1"),
            ("{{ x | nothing }}", "t.jinja: line 1: `x | nothing`: unknown filter"),
            ("\n\n{{ x + n }}", "t.jinja: line 3: `x + n`: "),
        ] {
            let text = refused(source);
            assert!(text.starts_with(want), "{source}: {text}");
        }
        let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{{ a }}{% endfor %}{% endfor %}";
        let stopped = Template::limited(endless, "t", 1000).unwrap().render(&Map::new()).unwrap_err();
        assert!(stopped.to_string().contains("takes more steps than"), "{stopped}");
    }
}
