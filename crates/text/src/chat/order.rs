//! Whether the roles of a conversation follow each other as models are trained to see them. A template may take any order; a
//! mistake in the data then goes into the model without an error.

use serde_json::Value;

use super::Record;

impl Record {
    /// What is unusual in the order of roles: the end of a sentence that begins with the line.
    pub fn disorder(&self) -> Option<String> {
        match self {
            Self::Messages(record) => disorder(&record.messages),
            Self::Completion { .. } | Self::Text(_) => None,
        }
    }
}

/// The system first, then the user, then in turns; what tools answer may come between.
fn disorder(messages: &[Value]) -> Option<String> {
    let mut before: Option<&Value> = None;
    for message in messages {
        let (role, earlier) = (role(message), before.map(role));
        let calls = |message: &Value| message.get("tool_calls").is_some_and(|calls| !calls.is_null());
        match (role, earlier) {
            ("system" | "developer", Some(_)) => {
                return Some(format!("has a message of the {role} that is not the first"));
            }
            ("assistant", None | Some("system" | "developer")) => {
                return Some("begins with the assistant, before any user".into());
            }
            ("user", Some("user")) => return Some("has two messages of the user in a row".into()),
            ("assistant", Some("assistant")) if !before.is_some_and(calls) => {
                return Some("has two messages of the assistant in a row".into());
            }
            _ => {}
        }
        before = Some(message);
    }
    None
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn roles_out_of_order_are_found() {
        let said = |roles: &str| {
            let messages: Vec<Value> =
                roles.split(' ').map(|role| json!({"role": role, "content": "a"})).collect();
            disorder(&messages)
        };
        for usual in [
            "user",
            "system user assistant user assistant",
            "developer user assistant",
            "user assistant tool assistant",
            "user assistant tool tool assistant user",
            "user critic user",
        ] {
            assert_eq!(said(usual), None, "{usual}");
        }
        for (roles, want) in [
            ("user user assistant", "two messages of the user"),
            ("user assistant assistant", "two messages of the assistant"),
            ("assistant user", "begins with the assistant"),
            ("system assistant", "begins with the assistant"),
            ("user system assistant", "message of the system that is not the first"),
            ("system system user", "message of the system that is not the first"),
        ] {
            let found = said(roles).unwrap();
            assert!(found.contains(want), "{roles}: {found}");
        }
        let call = json!({"role": "assistant", "tool_calls": [1]});
        let user = json!({"role": "user", "content": "a"});
        assert_eq!(disorder(&[user, call.clone(), call]), None);
    }
}
