//! Requests in OpenAI's schema. What we cannot do is refused by its name; what changes nothing is let through.

use crate::error::{ApiError, shown};
use hyper::StatusCode;
use ironhorse_train::generate::sample::Sampler;
use serde_json::{Map, Value};

type Result<T> = std::result::Result<T, ApiError>;

/// The most texts of one request: prompts times choices.
pub const MOST_TEXTS: usize = 128;
/// The most stop strings, and the most bytes of one.
const MOST_STOPS: usize = 16;
const STOP_BYTES: usize = 1024;
/// The most alternatives of a token.
const MOST_TOP: u64 = 20;

/// What is continued.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Tokens.
    Ids(Vec<u32>),
    /// A conversation, for the model's template.
    Chat(Vec<Value>),
}

/// A request to write.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The prompts, each to be continued `choices` times.
    pub prompts: Vec<Prompt>,
    /// `n`: the number of texts for each prompt.
    pub choices: usize,
    /// The most tokens of a text; `None`: as many as the context has room for.
    pub max_tokens: Option<usize>,
    /// How tokens are drawn; its seed is not set.
    pub sampler: Sampler,
    /// The seed of the first choice.
    pub seed: Option<u64>,
    /// Strings before which a text ends.
    pub stops: Vec<String>,
    /// How many alternatives of each token are told.
    pub logprobs: Option<usize>,
    /// Whether the prompt is part of the answer.
    pub echo: bool,
    /// Whether to go on after the token that ends a text.
    pub ignore_eos: bool,
    /// Whether the answer is sent piece by piece.
    pub stream: bool,
    /// Whether a stream tells at its end how many tokens there were.
    pub stream_usage: bool,
    /// Whether the prompt is a conversation.
    pub chat: bool,
    /// What the chat template is given besides the conversation.
    pub template_kwargs: Option<Map<String, Value>>,
}

/// Keys that change nothing that we do.
const HARMLESS: [&str; 8] = [
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
];

/// Keys that are understood only where they ask for nothing, with what that is.
fn asks_for_nothing(key: &str, value: &Value) -> Option<bool> {
    let zero = value.as_f64() == Some(0.0);
    let empty = value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
    Some(match key {
        "presence_penalty" | "frequency_penalty" => zero,
        "logit_bias" | "tools" | "functions" => empty,
        "tool_choice" | "function_call" => value == "none" || value == "auto",
        "response_format" => value.get("type").is_some_and(|kind| kind == "text"),
        "modalities" => value.as_array().is_some_and(|all| all.iter().all(|kind| kind == "text")),
        "suffix" => value == "",
        _ => return None,
    })
}

/// The keys of a request.
struct Keys(Map<String, Value>);

impl Keys {
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn bool(&mut self, name: &str) -> Result<bool> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(wrong(name, &other, "true or false")),
        }
    }

    fn count(&mut self, name: &str, most: u64) -> Result<Option<u64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().filter(|&count| count <= most) {
            Some(count) => Ok(Some(count)),
            None => Err(wrong(name, &value, &format!("a whole number from 0 to {most}"))),
        }
    }

    fn number(&mut self, name: &str, [least, most]: [f64; 2]) -> Result<Option<f32>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(wrong(name, &value, &format!("a number from {least} to {most}"))),
        }
    }
}

/// The error of a value that is none of what is expected.
fn wrong(name: &str, found: &Value, expected: &str) -> ApiError {
    ApiError::param(name, format!("`{name}` is {}, expected {expected}", shown(found.to_string())))
}

impl Asked {
    /// Reads the body of `/v1/completions`, or of `/v1/chat/completions`.
    pub fn read(body: &[u8], model: &str, chat: bool) -> Result<Self> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad(format!("the body is no JSON: {error}")))?;
        let Value::Object(map) = value else {
            return Err(ApiError::bad("the body is no JSON object"));
        };
        let mut keys = Keys(map);
        check_model(&mut keys, model)?;
        let prompts = if chat { vec![read_messages(&mut keys)?] } else { read_prompts(&mut keys)? };
        let choices = keys.count("n", MOST_TEXTS as u64)?.unwrap_or(1) as usize;
        if choices == 0 || prompts.len().saturating_mul(choices) > MOST_TEXTS {
            let message =
                format!("{} prompts with `n` {choices}: expected 1 to {MOST_TEXTS} texts", prompts.len());
            return Err(ApiError::param("n", message));
        }
        if let Some(best_of) = keys.count("best_of", MOST_TEXTS as u64)?
            && best_of as usize != choices
        {
            return Err(ApiError::param(
                "best_of",
                format!("`best_of` is {best_of}, expected `n`, {choices}"),
            ));
        }
        let most = u64::from(u32::MAX);
        let given = keys.count("max_tokens", most)?.or(keys.count("max_completion_tokens", most)?);
        // as OpenAI has it: completions are short, answers as long as they are
        let max_tokens = given.map_or((!chat).then_some(16), |count| Some(count as usize));
        let logprobs = read_logprobs(&mut keys, chat)?;
        let stream = keys.bool("stream")?;
        let asked = Self {
            prompts,
            choices,
            max_tokens,
            sampler: read_sampler(&mut keys)?,
            seed: read_seed(&mut keys)?,
            stops: read_stops(&mut keys)?,
            logprobs,
            echo: !chat && keys.bool("echo")?,
            ignore_eos: keys.bool("ignore_eos")?,
            stream,
            stream_usage: read_stream_options(&mut keys, stream)?,
            chat,
            template_kwargs: if chat { read_kwargs(&mut keys)? } else { None },
        };
        for (key, value) in &keys.0 {
            if value.is_null() || HARMLESS.contains(&key.as_str()) {
                continue;
            }
            let name = shown(key.clone());
            match asks_for_nothing(key, value) {
                Some(true) => {}
                Some(false) => return Err(ApiError::param(&name, format!("`{name}` is not supported"))),
                None => {
                    return Err(ApiError::param(&name, format!("`{name}` is not a parameter that is known")));
                }
            }
        }
        Ok(asked)
    }
}

fn check_model(keys: &mut Keys, model: &str) -> Result<()> {
    match keys.take("model") {
        None => Ok(()),
        Some(Value::String(name)) if name == model => Ok(()),
        Some(other) => {
            let Value::String(name) = &other else { return Err(wrong("model", &other, "a string")) };
            Err(no_model(name, model))
        }
    }
}

/// The error of a model that is not served.
pub fn no_model(name: &str, served: &str) -> ApiError {
    let message = format!("the model `{}` is not served here; `{served}` is", shown(name.to_owned()));
    let param = Some("model".to_owned());
    ApiError { status: StatusCode::NOT_FOUND, message, param, code: Some("model_not_found") }
}

fn read_prompts(keys: &mut Keys) -> Result<Vec<Prompt>> {
    const EXPECTED: &str = "a text, tokens, or a list of texts or of tokens";
    let Some(value) = keys.take("prompt") else {
        return Err(ApiError::param("prompt", "`prompt` is missing"));
    };
    let ids = |all: &[Value]| -> Option<Vec<u32>> {
        all.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
    };
    let one = |value: &Value| match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        Value::Array(all) if !all.is_empty() => ids(all).map(Prompt::Ids),
        _ => None,
    };
    if let Some(prompt) = one(&value) {
        return Ok(vec![prompt]);
    }
    match &value {
        Value::Array(all) if !all.is_empty() => {
            all.iter().map(|value| one(value).ok_or_else(|| wrong("prompt", value, EXPECTED))).collect()
        }
        other => Err(wrong("prompt", other, EXPECTED)),
    }
}

fn read_messages(keys: &mut Keys) -> Result<Prompt> {
    let value = keys.take("messages").ok_or_else(|| ApiError::param("messages", "`messages` is missing"))?;
    let Value::Array(mut messages) = value else {
        return Err(wrong("messages", &value, "a list of messages"));
    };
    if messages.is_empty() {
        return Err(ApiError::param("messages", "`messages` is empty, expected at least one message"));
    }
    for (at, message) in messages.iter_mut().enumerate() {
        let name = |part: &str| format!("messages[{at}].{part}");
        if !message["role"].is_string() {
            return Err(wrong(&name("role"), &message["role"], "a string"));
        }
        let joined = match &message["content"] {
            Value::Array(parts) => Some(join_parts(parts, &name("content"))?),
            Value::String(_) => None,
            Value::Null if message.get("tool_calls").is_some() => None, // what an assistant called
            other => return Err(wrong(&name("content"), other, "a text")),
        };
        if let Some(text) = joined {
            message["content"] = text.into();
        }
    }
    Ok(Prompt::Chat(messages))
}

/// The text of a content of several parts.
fn join_parts(parts: &[Value], name: &str) -> Result<String> {
    let texts = parts.iter().map(|part| match (&part["type"], &part["text"]) {
        (Value::String(kind), Value::String(text)) if kind == "text" => Ok(text.as_str()),
        _ => Err(wrong(name, part, "parts of type `text`")),
    });
    texts.collect::<Result<Vec<_>>>().map(|texts| texts.concat())
}

fn read_logprobs(keys: &mut Keys, chat: bool) -> Result<Option<usize>> {
    if !chat {
        return Ok(keys.count("logprobs", MOST_TOP)?.map(|count| count as usize));
    }
    let (wanted, top) = (keys.bool("logprobs")?, keys.count("top_logprobs", MOST_TOP)?);
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::param("top_logprobs", "`top_logprobs` needs `logprobs`")),
    }
}

fn read_sampler(keys: &mut Keys) -> Result<Sampler> {
    let top_p = keys.number("top_p", [0.0, 1.0])?;
    if top_p == Some(0.0) {
        return Err(ApiError::param(
            "top_p",
            "`top_p` is 0, expected more than 0; `temperature` 0 is greedy",
        ));
    }
    let top_k = keys.count("top_k", u64::from(u32::MAX))?.filter(|&k| k > 0);
    Ok(Sampler {
        temperature: keys.number("temperature", [0.0, 2.0])?.unwrap_or(1.0),
        top_k: top_k.map(|k| k as usize),
        top_p: top_p.filter(|&p| p < 1.0),
        seed: 0,
    })
}

/// Any whole number of 64 bits.
fn read_seed(keys: &mut Keys) -> Result<Option<u64>> {
    let Some(value) = keys.take("seed") else { return Ok(None) };
    let number = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    number.map(Some).ok_or_else(|| wrong("seed", &value, "a whole number"))
}

fn read_stops(keys: &mut Keys) -> Result<Vec<String>> {
    let Some(value) = keys.take("stop") else { return Ok(Vec::new()) };
    let expected = format!("a text or up to {MOST_STOPS} of them, of 1 to {STOP_BYTES} bytes each");
    let fail = || wrong("stop", &value, &expected);
    let all = match &value {
        Value::Array(all) => all.clone(),
        one => vec![one.clone()],
    };
    if all.len() > MOST_STOPS {
        return Err(fail());
    }
    let text = |stop: &Value| match stop {
        Value::String(text) if (1..=STOP_BYTES).contains(&text.len()) => Ok(text.clone()),
        _ => Err(fail()),
    };
    all.iter().map(text).collect()
}

fn read_stream_options(keys: &mut Keys, stream: bool) -> Result<bool> {
    match keys.take("stream_options") {
        None => Ok(false),
        Some(_) if !stream => Err(ApiError::param("stream_options", "`stream_options` needs `stream`")),
        Some(Value::Object(options)) => Ok(options.get("include_usage") == Some(&Value::Bool(true))),
        Some(other) => Err(wrong("stream_options", &other, "an object")),
    }
}

fn read_kwargs(keys: &mut Keys) -> Result<Option<Map<String, Value>>> {
    match keys.take("chat_template_kwargs") {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(wrong("chat_template_kwargs", &other, "an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::SHOWN;
    use serde_json::json;

    fn read(body: Value) -> Result<Asked> {
        Asked::read(body.to_string().as_bytes(), "m", false)
    }

    fn message(body: Value, chat: bool) -> (String, Option<String>) {
        let error = Asked::read(body.to_string().as_bytes(), "m", chat).unwrap_err();
        (error.message, error.param)
    }

    #[test]
    fn prompts_are_texts_or_tokens() {
        let prompts = |prompt: Value| read(json!({"prompt": prompt})).unwrap().prompts;
        assert_eq!(prompts(json!("a")), [Prompt::Text("a".into())]);
        assert_eq!(prompts(json!("")), [Prompt::Text(String::new())]);
        assert_eq!(prompts(json!([1, 2])), [Prompt::Ids(vec![1, 2])]);
        assert_eq!(prompts(json!(["a", "b"])), ["a", "b"].map(|text| Prompt::Text(text.into())));
        assert_eq!(prompts(json!([[1], [2, 3]])), [Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])]);
        for wrong in
            [json!([]), json!(3), json!([[]]), json!([-1]), json!({}), json!([1, "a"]), json!([1e20])]
        {
            assert_eq!(message(json!({"prompt": wrong}), false).1.as_deref(), Some("prompt"), "{wrong}");
        }
    }

    #[test]
    fn errors_repeat_little_of_what_a_client_sent() {
        let long = "é".repeat(5000);
        for body in [
            json!({"prompt": "a", "model": long}),
            json!({"prompt": "a", "temperature": long}),
            json!({"prompt": "a", &long: 1}),
        ] {
            let (said, param) = message(body, false);
            assert!(
                said.contains('…') && said.len() < 200 && param.is_some_and(|name| name.len() <= SHOWN),
                "{said}"
            );
        }
    }

    #[test]
    fn defaults_are_openais() {
        let asked = read(json!({"prompt": "a"})).unwrap();
        assert_eq!((asked.max_tokens, asked.choices, asked.sampler.temperature), (Some(16), 1, 1.0));
        assert!(!asked.stream && !asked.echo && asked.logprobs.is_none() && asked.seed.is_none());
        let chat = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
        let asked = Asked::read(chat.to_string().as_bytes(), "m", true).unwrap();
        assert_eq!(asked.max_tokens, None);
        assert_eq!(asked.prompts, [Prompt::Chat(vec![json!({"role": "user", "content": "ab"})])]);
        let seed = |seed: Value| read(json!({"prompt": "a", "seed": seed})).unwrap().seed;
        assert_eq!([seed(json!(7)), seed(json!(-1)), seed(json!(null))], [Some(7), Some(u64::MAX), None]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, param) in [
            (json!({"prompt": "a", "temperature": 3}), "temperature"),
            (json!({"prompt": "a", "temperature": "hot"}), "temperature"),
            (json!({"prompt": "a", "top_p": 0}), "top_p"),
            (json!({"prompt": "a", "n": 0}), "n"),
            (json!({"prompt": vec!["a"; 100], "n": 2}), "n"),
            (json!({"prompt": "a", "best_of": 4}), "best_of"),
            (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
            (json!({"prompt": "a", "max_tokens": -1}), "max_tokens"),
            (json!({"prompt": "a", "max_tokens": 1.5}), "max_tokens"),
            (json!({"prompt": "a", "stop": vec!["a"; 17]}), "stop"),
            (json!({"prompt": "a", "stop": ""}), "stop"),
            (json!({"prompt": "a", "seed": "x"}), "seed"),
            (json!({"prompt": "a", "stream": 1}), "stream"),
            (json!({"prompt": "a", "stream_options": {}}), "stream_options"),
            (json!({"prompt": "a", "suffix": "x"}), "suffix"),
            (json!({"prompt": "a", "presence_penalty": 0.5}), "presence_penalty"),
            (json!({"prompt": "a", "temprature": 1}), "temprature"),
            (json!({"prompt": "a", "model": "other"}), "model"),
            (json!({"prompt": "a", "model": 3}), "model"),
            (json!({}), "prompt"),
        ] {
            assert_eq!(message(body.clone(), false).1.as_deref(), Some(param), "{body}");
        }
        for (body, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hi"}), "messages"),
            (json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (json!({"messages": [7]}), "messages[0].role"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content",
            ),
            (json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}), "top_logprobs"),
            (json!({"messages": [{"role": "user", "content": "a"}], "echo": true}), "echo"),
            (json!({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}), "tools"),
        ] {
            assert_eq!(message(body.clone(), true).1.as_deref(), Some(param), "{body}");
        }
        let harmless = json!({"prompt": "a", "user": "me", "presence_penalty": 0, "logit_bias": {}, "suffix": null, "xyz": null});
        read(harmless).unwrap();
        for body in [&b""[..], b"{", b"[]", b"null", b"{\"prompt\": \"a\"} x", b"\xff"] {
            assert!(Asked::read(body, "m", false).is_err());
        }
    }
}
