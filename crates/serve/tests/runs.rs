//! Runs as a page: what is shown of them, who may see it, and that nothing else can be read.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

mod common;

use common::Server;
use ironhorse_serve::runs::{Shelf, Words, run};
use ironhorse_train::run::RunFolder;
use ironhorse_train::run::metrics::Metrics;
use ironhorse_train::session::LayerRouting;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn words() -> Words {
    let facts = |run: &ironhorse_train::run::view::RunView| vec![("made".to_owned(), run.made().to_string())];
    Words {
        state: Box::new(|_| "goes on".into()),
        facts: Box::new(facts),
        settings: Box::new(|_| Vec::new()),
    }
}

fn step(step: u64) -> Metrics {
    let load = vec![0.25, 0.25, 0.4, 0.1];
    Metrics {
        step,
        loss: 5.0 - step as f32 / 1000.0,
        val_loss: step.is_multiple_of(10).then_some(4.5),
        lr: 1e-3,
        ms: 10.0,
        tokens: Some(512),
        tokens_per_s: 51_200.0,
        router: vec![LayerRouting { load, entropy: 1.0, aux: 0.1 }],
        ..Metrics::default()
    }
}

/// A run of `steps` steps with two samples.
fn make(path: &Path, steps: u64) -> RunFolder {
    let mut folder = RunFolder::create(path, "steps = 100\nlr = 0.001\n", false).unwrap();
    (0..steps).for_each(|i| folder.log(&step(i)).unwrap());
    folder.sample(20, "once <b>").unwrap();
    folder.sample(40, "the end").unwrap();
    folder
}

fn served(shelf: Shelf, token: Option<&str>) -> Server {
    let token = token.map(str::to_owned);
    Server::start(move |listener, signal| run(listener, shelf, token, signal))
}

fn below(folder: &Path) -> Server {
    served(Shelf::below(folder.to_owned(), words()), None)
}

fn events(server: &Server, query: &str) -> impl Iterator<Item = Value> + use<> {
    server.events(&format!("/api/events?{query}"))
}

#[test]
fn a_page_a_list_and_what_is_known_of_a_run() {
    let top = tempfile::tempdir().unwrap();
    drop(make(&top.path().join("0001"), 50));
    fs::create_dir(top.path().join("empty")).unwrap();
    let profile = json!({"model": "d12", "ms": 5.0, "by_layer": [{"name": "h.0", "ms": 3.0, "of_possible": 0.5}], "by_kind": []});
    fs::write(top.path().join("0001/profile.json"), profile.to_string()).unwrap();
    let server = below(top.path());
    let (status, head, body) = server.get("/");
    assert_eq!(status, 200);
    assert!(body.contains("<title>ironhorse watch</title>"));
    let head = head.to_ascii_lowercase();
    assert!(
        head.contains("content-security-policy: default-src 'none'") && head.contains("no-store"),
        "{head}"
    );
    assert!(
        !body.contains("http://")
            || body.matches("http://").count() == body.matches("http://www.w3.org/2000/svg").count()
    );
    assert!(
        !body.contains("https://") && !body.contains("src=") && !body.contains("@import"),
        "nothing from elsewhere"
    );

    let list = server.json("/api/runs");
    assert_eq!(list["runs"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(list["runs"][0]["name"], "0001");
    assert!(list["runs"][0]["path"].is_null(), "no paths");
    assert_eq!((&list["quantities"][0]["key"], &list["smoothing"][0]["share"]), (&json!("loss"), &json!(60)));
    let told = server.json("/api/runs/0001");
    assert_eq!((&told["made"], &told["steps"], &told["last"]), (&json!(50), &json!(100), &json!(49)));
    assert_eq!(told["facts"], json!([["made", "50"]]));
    assert_eq!(told["samples"], json!([20, 40]));
    assert_eq!(told["router"], json!([[0.25, 0.25, 0.4, 0.1]]));
    let over = server.json("/api/experts/0001?layer=0");
    assert_eq!((&over["width"], &over["layers"]), (&json!(1), &json!(1)));
    assert_eq!(over["steps"].as_array().unwrap().len(), 50);
    assert_eq!((&over["steps"][30], &over["shares"][30]), (&json!(30), &json!([0.25, 0.25, 0.4, 0.1])));
    let (status, _, said) = server.get("/api/experts/0001?layer=1");
    assert!(status == 400 && said.contains("layer is 1, expected less than 1"), "{said}");
    assert_eq!(server.get("/api/experts/0002?layer=0").0, 404);
    assert_eq!(told["profile"]["layers"][0], json!({"name": "h.0", "ms": 3.0, "of_possible": 0.5}));
    assert!(told["quantities"].as_array().unwrap().contains(&json!("busiest_expert")));
    assert_eq!(server.json("/api/samples/0001?step=20"), json!({"step": 20, "text": "once <b>"}));
    assert_eq!(server.json("/api/samples/0001")["text"], "the end", "the newest");
    let (status, head, csv) = server.get("/api/csv/0001?from=9&to=11");
    assert!(status == 200 && head.contains("filename=\"0001.csv\""), "{head}");
    assert_eq!(csv.lines().count(), 4, "{csv}");
    assert!(csv.lines().nth(2).unwrap().starts_with("10,4.99,4.5,0.001,"), "{csv}");
}

#[test]
fn curves_are_thinned_and_keep_their_extremes() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("long");
    let mut folder = make(&path, 0);
    for i in 0..30_000 {
        let loss = if i == 23_456 { 99.0 } else { 3.0 + (i % 13) as f32 / 100.0 };
        folder
            .log(&Metrics { step: i, loss, lr: 1e-3, ms: 1.0, tokens_per_s: 1.0, ..Metrics::default() })
            .unwrap();
    }
    let server = served(Shelf::of(&[path], words()).unwrap(), None);
    let of = |query: &str| {
        server.json(&format!("/api/curves?run=long&quantity=loss&{query}"))["curves"][0].clone()
    };
    let steps = |curve: &Value, name: &str| -> Vec<u64> {
        curve[name].as_array().unwrap().iter().map(|x| x.as_u64().unwrap()).collect()
    };
    let whole = of("columns=100&smooth=60");
    let x = steps(&whole, "x");
    assert!(x.len() <= 400 && x.contains(&23_456) && x.contains(&0) && x.contains(&29_999), "{}", x.len());
    let at = x.iter().position(|&step| step == 23_456).unwrap();
    assert_eq!(whole["y"][at], 99.0, "as it is in the log, in its shortest digits");
    assert!(
        steps(&whole, "smooth_x").len() <= 400
            && whole["smooth_y"].as_array().unwrap().iter().all(|y| y.as_f64().unwrap() < 4.0)
    );
    let part = of("columns=100&from=100&to=130");
    assert_eq!(steps(&part, "x"), (100..=130).collect::<Vec<_>>());
    assert!(part["smooth_x"].is_null(), "no mean is asked for");
    let early = steps(&of("columns=100&across=log"), "x").iter().filter(|&&step| step < 100).count();
    assert!(early > 30, "{early}");
    let none = server.json("/api/curves?run=long&quantity=reward_accuracy");
    assert_eq!(none, json!({"curves": []}));
    let all = server.json("/api/curves?run=long&columns=1");
    assert_eq!(all["curves"].as_array().unwrap().len(), 4, "loss, learning rate, speed, time of a step");
}

#[test]
fn what_is_asked_wrongly_is_refused_with_what_is_expected() {
    let top = tempfile::tempdir().unwrap();
    drop(make(&top.path().join("0001"), 5));
    let server = below(top.path());
    let many = "run=0001&".repeat(17);
    for (path, status, expected) in [
        ("/api/curves?run=0001&quantity=nonsense", 400, "expected one of loss, val_loss"),
        ("/api/curves?run=0001&columns=-1", 400, "expected a whole number"),
        ("/api/curves?run=0001&from=1e9", 400, "expected a whole number"),
        ("/api/curves?run=0002", 404, "is not a run that is shown here"),
        (&format!("/api/curves?{many}"), 400, "expected 16 at most"),
        ("/api/samples/0001?step=7", 404, "no such sample"),
        ("/api/runs/", 404, "is not a run"),
        ("/api", 404, "not a path"),
        ("/api/other/0001", 404, "not a path"),
        ("/favicon.ico", 404, "not a path"),
    ] {
        let (found, _, body) = server.get(path);
        assert!(found == status && body.contains(expected), "{path}: {found} {body}");
    }
    // any number of columns and any part are as many points as there are
    assert_eq!(server.json("/api/curves?run=0001&columns=99999999999&from=3&to=1")["curves"], json!([]));
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let head = format!(
            "{method} /api/runs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        let (status, head, _) = server.raw(head.as_bytes());
        assert!(status == 405 && head.to_ascii_lowercase().contains("allow: get, head"), "{head}");
    }
    let (status, ..) = server.raw(b"HEAD /api/runs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert_eq!(status, 200);
}

#[test]
fn nothing_outside_of_the_runs_can_be_read() {
    let top = tempfile::tempdir().unwrap();
    let runs = top.path().join("runs");
    fs::create_dir(&runs).unwrap();
    drop(make(&runs.join("0001"), 5));
    drop(make(&top.path().join("secret"), 5));
    fs::write(top.path().join("secret.txt"), "the secret").unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        symlink(top.path().join("secret"), runs.join("link")).unwrap();
        fs::create_dir(runs.join("log")).unwrap();
        symlink(top.path().join("secret/metrics.jsonl"), runs.join("log/metrics.jsonl")).unwrap();
        symlink(top.path().join("secret.txt"), runs.join("0001/samples/step-000050.txt")).unwrap();
        symlink(top.path().join("secret.txt"), runs.join("0001/profile.json")).unwrap();
    }
    let server = below(&runs);
    assert_eq!(
        server.json("/api/runs")["runs"].as_array().unwrap().len(),
        1,
        "links that lead out are no runs"
    );
    for what in ["runs", "samples", "csv"] {
        for name in [
            "../secret",
            "..%2Fsecret",
            "%2e%2e/secret",
            "%2e%2e%2fsecret",
            "..%5Csecret",
            "0001/../../secret",
            "0001%2F..%2F..%2Fsecret",
            "0001%00",
            "/etc",
            "%2Fetc%2Fpasswd",
            ".",
            "..",
            "",
            "link",
            "log",
            "secret",
            "./0001",
        ] {
            let (status, _, body) = server.get(&format!("/api/{what}/{name}"));
            assert!(status == 404, "{what}/{name}: {status} {body}");
        }
    }
    for query in ["run=..%2Fsecret", "run=/etc/passwd", "run=link"] {
        assert_eq!(server.get(&format!("/api/curves?{query}")).0, 404, "{query}");
    }
    for path in ["/../secret.txt", "/runs/0001/metrics.jsonl", "/%2e%2e/secret.txt", "//etc/passwd"] {
        assert_eq!(server.get(path).0, 404, "{path}");
    }
    if cfg!(unix) {
        let (status, _, body) = server.get("/api/samples/0001?step=50");
        assert!(
            status == 404 && !body.contains("the secret"),
            "a sample that is a link out of its run: {body}"
        );
        assert!(server.json("/api/runs/0001")["profile"].is_null());
        assert_eq!(server.json("/api/samples/0001?step=40")["text"], "the end");
    }
}

#[test]
fn a_token_is_asked_for_and_names_of_other_machines_are_refused() {
    let top = tempfile::tempdir().unwrap();
    drop(make(&top.path().join("0001"), 5));
    let shelf = || Shelf::below(top.path().to_owned(), words());
    let server = served(shelf(), Some("the-token"));
    assert_eq!(server.get("/").0, 200, "the page holds nothing");
    for path in [
        "/api/runs",
        "/api/runs/0001",
        "/api/events",
        "/api/curves?run=0001",
        "/api/csv/0001",
        "/api/samples/0001",
        "/api/x",
    ] {
        for more in [
            "",
            "authorization: Bearer wrong\r\n",
            "authorization: Bearer the-toke\r\n",
            "authorization: Basic the-token\r\n",
        ] {
            let (status, head, body) = server.get_with(path, more);
            assert!(status == 401 && !body.contains("0001"), "{path} {more}: {status} {body}");
            assert!(head.to_ascii_lowercase().contains("www-authenticate: bearer"));
        }
    }
    let query = server.get("/api/runs?token=the-token");
    assert_eq!(query.0, 401, "addresses are kept in histories and logs: a token there does not count");
    let (status, _, body) = server.get_with("/api/runs", "authorization: Bearer the-token\r\n");
    assert!(status == 200 && body.contains("0001"), "{body}");
    // without a token, a page of another site could give our port its own name
    let server = served(shelf(), None);
    let (status, _, body) =
        server.raw(b"GET /api/runs HTTP/1.1\r\nhost: evil.example:8090\r\nconnection: close\r\n\r\n");
    assert!(status == 403 && body.contains("evil.example"), "{body}");
    assert_eq!(server.raw(b"GET /api/runs HTTP/1.1\r\nhost: [::1]:80\r\nconnection: close\r\n\r\n").0, 200);
}

#[test]
fn sizes_are_bounded_and_clients_that_go_away_are_forgotten() {
    let top = tempfile::tempdir().unwrap();
    drop(make(&top.path().join("0001"), 50));
    let server = below(top.path());
    let body = format!(
        "GET /api/runs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        1 << 30
    );
    let (status, ..) = server.raw(&[body.as_bytes(), &vec![b'x'; 8192]].concat());
    assert_eq!(status, 413);
    let long = format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "x".repeat(1 << 20));
    let (status, ..) = server.raw(long.as_bytes());
    assert!([0, 400, 414, 431].contains(&status), "{status}");
    let heads = format!("GET /api/runs HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "a: b\r\n".repeat(50_000));
    assert_ne!(server.raw(heads.as_bytes()).0, 200);
    for nonsense in
        [&b"\x16\x03\x01\x02\x00"[..], b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0\0\0\0\r\n\r\n"]
    {
        assert_ne!(server.raw(nonsense).0, 200);
    }
    // streams that are cut, answers that nobody reads, half a request
    for i in 0..100 {
        let mut stream = server.connect();
        let path = ["/api/events?run=0001", "/api/csv/0001", "/api/curves?run=0001"][i % 3];
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localh").unwrap();
        if i % 2 == 0 {
            write!(stream, "ost\r\n\r\n").unwrap();
        }
    }
    assert_eq!(server.json("/api/runs/0001")["made"], 50);
    let _open: Vec<_> = (0..20).map(|_| events(&server, "run=0001").next().unwrap()).collect();
    assert!(server.end() < Duration::from_secs(5), "open streams end with the server");
}

#[test]
fn a_run_that_grows_is_followed_and_a_new_one_appears() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("0001");
    let mut folder = make(&path, 3);
    let server = below(top.path());
    let mut events = events(&server, "run=0001&run=gone");
    let list = events.next().unwrap();
    assert_eq!(list["list"][0]["name"], "0001");
    let first = events.next().unwrap();
    assert_eq!((&first["run"], &first["told"]["made"]), (&json!("0001"), &json!(3)));
    let gone = events.next().unwrap();
    assert!(
        gone["run"] == "gone" && gone["told"]["error"]["message"].as_str().unwrap().contains("is not a run"),
        "{gone}"
    );
    folder.log(&step(3)).unwrap();
    let next = events.next().unwrap();
    assert_eq!(next["told"]["made"], 4);
    assert!(next["told"]["version"].as_u64() > first["told"]["version"].as_u64());
    assert_eq!(server.json("/api/curves?run=0001&quantity=loss")["curves"][0]["x"], json!([0, 1, 2, 3]));
    drop(make(&top.path().join("0002"), 1));
    let new = events.find(|event| event["list"].is_array()).unwrap();
    assert_eq!(new["list"].as_array().unwrap().len(), 2);
    // a log that is written anew
    drop(folder);
    fs::write(path.join("metrics.jsonl"), step(0).to_line() + "\n").unwrap();
    let back = events.find(|event| event["run"] == "0001" && event["told"]["made"] == 1).unwrap();
    assert_eq!(back["told"]["last"], 0);
}

#[test]
fn given_runs_have_names_of_their_own() {
    let top = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a/run", "b/run", "c"].iter().map(|name| top.path().join(name)).collect();
    for (i, path) in paths.iter().enumerate() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        drop(make(path, 1 + i as u64));
    }
    let server = served(Shelf::of(&[&paths[..], &paths[..1]].concat(), words()).unwrap(), None);
    let list = server.json("/api/runs");
    let mut names: Vec<String> =
        list["runs"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect();
    names.sort();
    let second = paths[1].display().to_string();
    let mut expected = vec!["run".to_owned(), second.clone(), "c".to_owned()];
    expected.sort();
    assert_eq!(names, expected);
    assert_eq!(server.json("/api/runs/run")["made"], 1);
    assert_eq!(server.json(&format!("/api/runs/{}", second.replace('/', "%2F")))["made"], 2);
    assert!(Shelf::of(&[top.path().join("none")], words()).is_err());
    // the newest first, also among those of one second
    let log = fs::File::options().append(true).open(paths[1].join("metrics.jsonl")).unwrap();
    let now = std::time::SystemTime::now() + Duration::from_secs(60);
    log.set_modified(now).unwrap();
    let other = fs::File::options().append(true).open(paths[0].join("metrics.jsonl")).unwrap();
    other.set_modified(now - Duration::from_millis(1)).unwrap();
    let order = server.json("/api/runs")["runs"].clone();
    assert_eq!((&order[0]["name"], &order[1]["name"]), (&json!(second), &json!("run")));
    other.set_modified(now + Duration::from_millis(1)).unwrap();
    assert_eq!(server.json("/api/runs")["runs"][0]["name"], "run");
}
