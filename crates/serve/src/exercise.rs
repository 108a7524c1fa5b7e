//! What the fuzz target and a test do with the bytes of a request: read them, and check what holds for every request that
//! is accepted and for every error.

use crate::schema::{Asked, MOST_TEXTS, Prompt};

/// The longest error that a client is told, in bytes.
const MOST_SAID: usize = 400;

/// The body of `/v1/completions` and of `/v1/chat/completions`. Returns whether one of them accepts it.
pub fn request(bytes: &[u8]) -> bool {
    [false, true].map(|chat| accepts(bytes, chat)).contains(&true)
}

fn accepts(bytes: &[u8], chat: bool) -> bool {
    let asked = match Asked::read(bytes, "model", chat) {
        Ok(asked) => asked,
        Err(error) => {
            assert!(error.status.is_client_error(), "{error:?}");
            assert!(error.message.len() <= MOST_SAID, "{error:?}");
            assert!(error.json()["error"]["message"].is_string(), "{error:?}");
            return false;
        }
    };
    let texts = asked.prompts.len() * asked.choices;
    assert!((1..=MOST_TEXTS).contains(&texts), "{texts} texts");
    for prompt in &asked.prompts {
        match prompt {
            Prompt::Chat(messages) => assert!(chat && !messages.is_empty()),
            Prompt::Ids(ids) => assert!(!chat && !ids.is_empty()),
            Prompt::Text(_) => assert!(!chat),
        }
    }
    let sampler = &asked.sampler;
    assert!((0.0..=2.0).contains(&sampler.temperature), "{sampler:?}");
    assert!(sampler.top_p.is_none_or(|p| p > 0.0 && p < 1.0) && sampler.top_k != Some(0), "{sampler:?}");
    assert!(asked.stops.iter().all(|stop| !stop.is_empty()), "an empty stop would end every text");
    assert!(asked.logprobs.is_none_or(|top| top <= 20) && (asked.stream || !asked.stream_usage));
    true
}

#[cfg(test)]
mod tests {
    use super::request;

    /// Requests that are accepted; the mutations start at them.
    const REQUESTS: [&str; 4] = [
        r#"{"prompt": "a", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": -1, "stop": ["a", "bc"]}"#,
        r#"{"prompt": [[1, 2], [3]], "n": 2, "logprobs": 5, "echo": true, "stream": true, "stream_options": {"include_usage": true}}"#,
        r#"{"model": "model", "messages": [{"role": "user", "content": [{"type": "text", "text": "\u00e9"}]}], "logprobs": true, "top_logprobs": 2}"#,
        r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": []}], "chat_template_kwargs": {"a": [1e9, null]}, "logit_bias": {}}"#,
    ];
    /// What is put in the place of bytes.
    const PIECES: [&str; 16] = [
        "null",
        "[]",
        "{}",
        "-1",
        "0",
        "1e400",
        "1e-400",
        "18446744073709551616",
        "\"\\ud800\"",
        "\"\"",
        ",",
        ":",
        "\u{0}",
        "é",
        "[[",
        "true",
    ];

    #[test]
    fn any_bytes_are_a_request_or_an_error() {
        let mut state = 1_u64;
        let mut below = |most: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % most
        };
        let mut accepted = 0;
        for body in REQUESTS {
            assert!(request(body.as_bytes()), "{body}");
            for _ in 0..2000 {
                let mut bytes = body.as_bytes().to_vec();
                for _ in 0..=below(3) {
                    let at = below(bytes.len() + 1);
                    let end = (at + below(8)).min(bytes.len());
                    bytes.splice(at..end, PIECES[below(PIECES.len())].bytes());
                }
                accepted += usize::from(request(&bytes));
            }
        }
        assert!(
            (100..7000).contains(&accepted),
            "{accepted} of 8000: mutations that are all refused, or none, test little"
        );
    }
}
