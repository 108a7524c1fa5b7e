//! `{% generation %}`: transformers' tag around what the assistant says. The template engine has no such tag, so it becomes a
//! filter block, which is trimmed like any other tag, and whose filter puts a mark before and after its text; within it a `with`
//! block has the scope that the tag has for transformers.

use std::ops::Range;

/// The filter that marks.
pub const FILTER: &str = "__generation__";
/// The marks. Unicode keeps these characters free for such use: they are in no text.
pub const OPEN: char = '\u{fdd0}';
pub const CLOSE: char = '\u{fdd1}';

/// The template with filter blocks in place of the tags, and whether it had any. Lines stay the same.
pub fn rewrite(source: &str) -> (String, bool) {
    let (mut text, mut marks, mut at) = (String::with_capacity(source.len()), false, 0);
    while let Some(open) = source[at..].find('{').map(|offset| at + offset) {
        let end = match source.as_bytes().get(open + 1) {
            Some(b'#') => source[open + 2..].find("#}").map_or(source.len(), |length| open + length + 4),
            Some(b'{') => tag_end(source, open, "}}"),
            Some(b'%') => tag_end(source, open, "%}"),
            _ => open + 1,
        };
        text.push_str(&source[at..open]);
        let tag = &source[open..end];
        at = end;
        match tag_name(tag) {
            Some((name, "generation")) => {
                text += &format!("{}filter {FILTER} %}}{{% with{}", &tag[..name.start], &tag[name.end..]);
                marks = true;
            }
            Some((name, "endgeneration")) => {
                text += &format!("{}endwith %}}{{% endfilter{}", &tag[..name.start], &tag[name.end..]);
            }
            Some((_, "raw")) => {
                at = raw_end(source, end);
                text.push_str(&source[open..at]);
            }
            _ => text.push_str(tag),
        }
    }
    text.push_str(&source[at..]);
    (text, marks)
}

/// The end of a tag that begins at `open`; its end mark may be in a string.
fn tag_end(source: &str, open: usize, close: &str) -> usize {
    let (mut quote, mut escaped) = (None, false);
    for (offset, c) in source[open + 2..].char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None if c == '\'' || c == '"' => quote = Some(c),
            None if source[open + 2 + offset..].starts_with(close) => return open + 2 + offset + close.len(),
            None => {}
        }
    }
    source.len()
}

/// The first word of a block tag and where it is.
fn tag_name(tag: &str) -> Option<(Range<usize>, &str)> {
    let inside = tag.strip_prefix("{%")?.trim_start_matches(['-', '+']).trim_start();
    let start = tag.len() - inside.len();
    let length = inside.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(inside.len());
    Some((start..start + length, &inside[..length]))
}

/// The end of the block tag that ends a raw block.
fn raw_end(source: &str, from: usize) -> usize {
    let mut at = from;
    while let Some(open) = source[at..].find("{%").map(|offset| at + offset) {
        let end = tag_end(source, open, "%}");
        if tag_name(&source[open..end]).is_some_and(|(_, name)| name == "endraw") {
            return end;
        }
        at = open + 2;
    }
    source.len()
}

/// The text without the marks, and what was between them, in bytes of that text.
pub fn take_marks(marked: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(marked.len());
    let (mut spans, mut open) = (Vec::new(), Vec::new());
    for c in marked.chars() {
        match c {
            OPEN => open.push(text.len()),
            CLOSE => {
                let span = open.pop().map(|start| start..text.len());
                spans.extend(span.filter(|span| !span.is_empty() && open.is_empty()));
            }
            c => text.push(c),
        }
    }
    (text, spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_become_filter_blocks() {
        let (text, marks) =
            rewrite("a{%- generation -%}\nb{% endgeneration %}c{%generation%}{%endgeneration%}");
        assert_eq!(
            text,
            "a{%- filter __generation__ %}{% with -%}\nb{% endwith %}{% endfilter %}c\
             {%filter __generation__ %}{% with%}{%endwith %}{% endfilter%}"
        );
        assert!(marks);
    }

    #[test]
    fn what_only_looks_like_a_tag_stays() {
        for source in [
            "{# {% generation %} #}",
            "{#} {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% set a = \"{% generation %} \\\" %}\" %}",
            "{% if generation %}{% endif %}",
            "{% generation_prompt %}",
            "{ % generation %} {",
            "{% unclosed 'generation",
            "{# unclosed",
        ] {
            assert_eq!(rewrite(source), (source.to_owned(), false));
        }
    }

    #[test]
    fn marks_become_spans() {
        let (text, spans) =
            take_marks("é\u{fdd0}ab\u{fdd1}c\u{fdd0}\u{fdd1}\u{fdd0}d\u{fdd0}e\u{fdd1}\u{fdd1}");
        assert_eq!((text.as_str(), spans), ("éabcde", vec![2..4, 5..7]));
    }
}
