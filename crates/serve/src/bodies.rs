//! The bodies of requests: read with limits on time, on the bytes of each and on those of all together.

use crate::http::{BadBody, Limits};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::HeaderMap;
use hyper::body::{Body, Incoming};
use hyper::header::EXPECT;
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

/// The part of the room that a body takes.
pub type Room = Option<OwnedSemaphorePermit>;

impl Bodies {
    /// As these limits say. A single body of the largest size always fits.
    pub fn new(limits: &Limits) -> Self {
        let units = limits.bodies_bytes.max(limits.body_bytes).div_ceil(UNIT) + 1;
        let room = Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS)));
        Self { time: limits.body, most: limits.body_bytes, room }
    }

    /// A whole body. One that says that it is too large is not read at all.
    pub async fn read(&self, body: &mut Incoming) -> Result<(Bytes, Room), BadBody> {
        if body.size_hint().lower() > self.most as u64 {
            return Err(BadBody::Large);
        }
        let end = Instant::now() + self.time;
        let (mut bytes, mut room): (_, Room) = (BytesMut::new(), None);
        loop {
            let frame = match timeout_at(end, body.frame()).await {
                Err(_) => return Err(BadBody::Slow),
                Ok(None) => return Ok((bytes.freeze(), room)),
                Ok(Some(Err(_))) => return Err(BadBody::Broken),
                Ok(Some(Ok(frame))) => frame,
            };
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > self.most {
                return Err(BadBody::Large);
            }
            bytes.extend_from_slice(&data);
            let more =
                bytes.len().div_ceil(UNIT) - room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let more = self.room.clone().try_acquire_many_owned(more as u32).map_err(|_| BadBody::Crowded)?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
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

/// Whether the client sends its body only when it is asked to go on.
pub fn is_expecting(headers: &HeaderMap) -> bool {
    headers.get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}
