//! The bodies of requests: read with limits on time, on the bytes of each and on those of all together.

use crate::http::{BadBody, Limits};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{EXPECT, HeaderValue};
use hyper::{HeaderMap, Version};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Bytes that are counted at a time.
const UNIT: usize = 4096;
/// How long a client that was refused may pause in the middle of its body.
const PAUSE: Duration = Duration::from_secs(1);

/// Room for the bodies of all connections.
#[derive(Clone)]
pub struct Bodies {
    time: Duration,
    most: usize,
    room: Arc<Semaphore>,
}

/// A body and the part of the room that it takes, which is free again when nobody needs the body any more: an answer may take minutes
/// longer.
struct Held {
    bytes: BytesMut,
    room: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Bodies {
    /// Room for bodies as these limits say. A single body of the largest size always fits.
    pub fn new(limits: &Limits) -> Self {
        let units = limits.bodies_bytes.max(limits.body_bytes).div_ceil(UNIT) + 1;
        let room = Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS)));
        Self { time: limits.body, most: limits.body_bytes, room }
    }

    /// Whether a body says that it is too large.
    pub fn is_too_large(&self, body: &Incoming) -> bool {
        body.size_hint().lower() > self.most as u64
    }

    /// A whole body.
    pub async fn read(&self, body: &mut Incoming) -> Result<Bytes, BadBody> {
        let end = Instant::now() + self.time;
        let mut held = Held { bytes: BytesMut::new(), room: None };
        loop {
            let frame = match timeout_at(end, body.frame()).await {
                Err(_) => return Err(BadBody::Slow),
                Ok(None) => return Ok(Bytes::from_owner(held)),
                Ok(Some(Err(_))) => return Err(BadBody::Broken),
                Ok(Some(Ok(frame))) => frame,
            };
            let Ok(data) = frame.into_data() else { continue };
            if held.bytes.len() + data.len() > self.most {
                return Err(BadBody::Large);
            }
            held.bytes.extend_from_slice(&data);
            let has = held.room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let more = (held.bytes.len().div_ceil(UNIT) - has) as u32;
            let more = self.room.clone().try_acquire_many_owned(more).map_err(|_| BadBody::Crowded)?;
            match &mut held.room {
                Some(room) => room.merge(more),
                None => held.room = Some(more),
            }
        }
    }

    /// Reads what is left of a body that is not wanted and forgets it, as long as it keeps coming, within the limits of a body: a client that
    /// still sends could otherwise not read its answer, because the connection would be reset.
    pub async fn pass_over(self, mut body: Incoming) {
        let (end, mut bytes) = (Instant::now() + self.time, 0);
        while let Ok(Some(Ok(frame))) = timeout_at(end.min(Instant::now() + PAUSE), body.frame()).await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > self.most {
                return;
            }
        }
    }
}

/// Whether the client sends its body only when it is asked to go on, which HTTP/1.0 does not know.
pub fn is_expecting(version: Version, headers: &HeaderMap) -> bool {
    let expects = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    version > Version::HTTP_10 && headers.get(EXPECT).is_some_and(expects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_free_when_the_last_part_of_a_body_is() {
        let all = Arc::new(Semaphore::new(5));
        let room = Some(all.clone().try_acquire_many_owned(3).unwrap());
        let body = Bytes::from_owner(Held { bytes: BytesMut::from(&b"a body"[..]), room });
        let part = body.slice(2..);
        assert_eq!((&part[..], all.available_permits()), (&b"body"[..], 2));
        drop(body);
        assert_eq!(all.available_permits(), 2);
        drop(part);
        assert_eq!(all.available_permits(), 5);
    }

    #[test]
    fn only_newer_clients_wait_to_be_asked() {
        let mut headers = HeaderMap::new();
        assert!(!is_expecting(Version::HTTP_11, &headers));
        headers.insert(EXPECT, HeaderValue::from_static("100-Continue"));
        assert!(is_expecting(Version::HTTP_11, &headers));
        assert!(!is_expecting(Version::HTTP_10, &headers), "they send at once");
    }
}
