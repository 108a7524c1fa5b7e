//! A small model, served.

use super::Server;
use ironhorse_cpu::CpuEngine;
use ironhorse_serve::{Error, Model, Settings, run};
use ironhorse_text::chat::Chat;
use ironhorse_text::tokenizer::Tokenizer;
use ironhorse_train::model::ModelConfig;
use ironhorse_train::session::{Serving, Session, SessionSpec};
use std::net::TcpListener;
use std::sync::atomic::AtomicUsize;

const SIZES: &str =
    "kind=qwen3,hidden=32,layers=2,heads=2,kv_heads=1,head_dim=16,ffn=40,vocab=256,context=200";
const TEMPLATE: &str = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

/// The model.
pub fn session(spec: &SessionSpec) -> Session {
    let config = ModelConfig::parse(SIZES).unwrap();
    let mut session = Session::new(Box::new(CpuEngine::new(1)), config, spec).unwrap();
    session.init(5).unwrap();
    session
}

/// A server with four rows.
pub fn served(change: impl FnOnce(&mut Settings)) -> Server {
    served_rows(4, change)
}

/// A server with `rows` rows.
pub fn served_rows(rows: usize, change: impl FnOnce(&mut Settings)) -> Server {
    let mut settings = Settings::default();
    change(&mut settings);
    Server::start(move |listener, signal| serve(listener, rows, settings, signal))
}

/// Serves on this thread.
pub fn serve(
    listener: TcpListener,
    rows: usize,
    settings: Settings,
    signal: &AtomicUsize,
) -> Result<(), Error> {
    let serving = Serving { sequences: rows, context: None, tokens: 16, all_logits: true };
    let mut session = session(&SessionSpec { serving: Some(serving), ..SessionSpec::default() });
    let folder = std::env::temp_dir().join(format!("ironhorse-serve-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("chat.jinja");
    std::fs::write(&file, TEMPLATE).unwrap();
    let model = Model {
        name: "small/model".into(),
        tokenizer: Tokenizer::bytes(),
        chat: Some(Chat::open("bytes", Some(&file)).unwrap()),
        context: 200,
        vocab: 256,
        most_tokens: usize::MAX,
    };
    run(listener, &mut session, model, settings, signal)
}
