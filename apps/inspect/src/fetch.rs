//! Decodes fetch lanes: a destination's requests for pages that its guest lacks.

use std::io::Read;

use serde_json::json;
use vmferry_memory::PageRun;
use vmferry_transport::RecordingHeader;
use vmferry_wire::{PAGE_REQUEST_BYTES, PageRequest};

use crate::bytes::{Bytes, Stop};
use crate::control::broken;
use crate::record::Record;
use crate::{Inspector, Tell};

const WHAT: &str = "a request for pages";

/// Whether bytes that a destination sends after its greeting are a request. Where a request has
/// reserved bytes, a message has its type, which is not 0.
pub fn is_request(bytes: &[u8]) -> bool {
    bytes.get(4..8) == Some(&[0; 4])
}

impl Inspector {
    /// Decodes the requests on a fetch lane.
    pub(crate) fn requests<R: Read>(
        &mut self,
        header: &RecordingHeader,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let mut requests = 0;
        while !bytes.is_at_end()? {
            let offset = bytes.offset();
            let request = PageRequest::parse(&bytes.array::<PAGE_REQUEST_BYTES>(WHAT)?)
                .map_err(|error| broken(offset, WHAT, &error))?;
            let PageRun { slot, first, pages } = request.run();
            let known = self.sessions.known(header).and_then(|session| session.announced.as_ref());
            if let Some((layout, _)) = known {
                let in_slot = layout.get(usize::from(slot.0)).map_or(0, |slot| slot.pages);
                if first.saturating_add(pages) > in_slot {
                    let problem =
                        format!("page {first}+{pages} of {slot} does not exist: it has {in_slot}");
                    return Err(Stop::Broken { offset, what: WHAT.into(), problem });
                }
            }
            requests += 1;
            let fields = json!({ "slot": slot.0, "first": first, "pages": pages });
            tell(&Record::new(offset, PAGE_REQUEST_BYTES as u64, "request", fields))?;
        }
        if let Some(channel) = self.sessions.fetch_channel(header) {
            channel.requests = Some(requests);
        }
        Ok(())
    }
}
