//! What is new, as server-sent events: first everything, then what changes.

use super::shelf::Shelf;
use crate::http::{Source, sent};
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Without news a line that means nothing is sent, which tells a client that is gone from one that waits.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// Follows runs until the client goes away or the server ends.
pub fn follow(shelf: Arc<Shelf>, names: Vec<String>, mut ended: watch::Receiver<bool>) -> Box<dyn Source> {
    // a client that does not read makes us wait, and is cut off by the server
    let (send, news) = mpsc::channel(1);
    tokio::spawn(async move {
        let (mut known, mut spoke) = (Known::default(), Instant::now());
        loop {
            let (shelf, names) = (shelf.clone(), names.clone());
            let looked = tokio::task::spawn_blocking(move || {
                let events = known.look(&shelf, &names);
                (known, events)
            });
            let Ok((now, mut events)) = looked.await else { return };
            known = now;
            if events.is_empty() && spoke.elapsed() >= SIGN_OF_LIFE {
                events = ":\n\n".to_owned();
            }
            if !events.is_empty() {
                spoke = Instant::now();
                if send.send(Bytes::from(events)).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = send.closed() => return,
                _ = ended.wait_for(|ended| *ended) => return,
            }
        }
    });
    Box::new(News(news))
}

struct News(mpsc::Receiver<Bytes>);

impl Source for News {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(cx)
    }
}

/// What a client was told.
#[derive(Default)]
struct Known {
    names: Vec<String>,
    told: HashMap<String, Value>,
}

impl Known {
    /// The events of what is new.
    fn look(&mut self, shelf: &Shelf, names: &[String]) -> String {
        let mut events = String::new();
        let list = shelf.names();
        let now: Vec<String> = list.iter().map(|one| one.name.clone()).collect();
        let mut sorted = now.clone();
        sorted.sort(); // the order changes with every step of two runs
        if sorted != self.names {
            events += &sent(&json!({"list": list}));
            self.names = sorted;
        }
        for name in names {
            let told = match shelf.open(name) {
                Ok(run) => run.told(shelf),
                Err(error) => error.json(),
            };
            if self.told.get(name) != Some(&told) {
                events += &sent(&json!({"run": name, "told": told}));
                self.told.insert(name.clone(), told);
            }
        }
        events
    }
}
