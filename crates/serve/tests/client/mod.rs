//! What a client reads.

use std::io::{BufReader, Read};
use std::net::TcpStream;

/// The status, the head and the body of an answer.
pub fn answer(stream: TcpStream) -> (u16, String, String) {
    let mut all = Vec::new();
    let _ = BufReader::new(stream).read_to_end(&mut all); // a connection that is cut has told what it has
    let all = String::from_utf8_lossy(&all).into_owned();
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let body = match head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    };
    (status, head.to_owned(), body)
}

/// A body without the sizes of its chunks.
fn unchunked(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 || size > rest.len() {
            break;
        }
        out.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    out
}
