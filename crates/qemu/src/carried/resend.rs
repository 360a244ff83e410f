//! Sends the pages that a destination lacks in place of a QEMU whose post-copy has failed.
//!
//! QEMU 10.0 does not pause a post-copy that breaks after it has written its last page: it fails,
//! and no command connects it again. But its guest is paused, and all of its memory is there. The
//! destination's QEMU waits for its post-copy to be continued (`migrate-recover`), as always. So
//! vmferry does what a source's QEMU does then: it asks which pages have arrived, tells the
//! destination to go on, answers its requests on the further channel, and sends the rest on the
//! main stream.
//!
//! Source: QEMU 10.0 `migration/migration.c`, `postcopy_do_resume`; `migration/savevm.c`,
//! `qemu_loadvm_state_main`; `migration/ram.c`, `ram_load_postcopy`, `ramblock_recv_bitmap_send`.

use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;
use serde_json::json;
use vmferry::vmm::streamed::{LateFailure, LateStreams};
use vmferry_memory::{GuestBytes, PAGE_SIZE, is_zero};

use super::protocol::{
    self, BITMAP, POSTCOPY_RESUME, RECV_BITMAP, REQUEST, REQUEST_OF_BLOCK, RESUME_ACK, SHUT,
    unknown,
};
use crate::error::QemuError;
use crate::located::{self, Listed};
use crate::qmp::Qmp;
use crate::state;
use crate::stream::{EOS, WHOLE, ZERO};

/// Types of sections (`enum qemu_vm_section`): the last byte of the stream, and the first ones of a
/// section and of what follows it.
const END_OF_STREAM: u8 = 0;
const SECTION_START: u8 = 1;
const SECTION_FOOTER: u8 = 0x7e;

/// The section's number, which it gives itself.
const SECTION: u32 = u32::MAX;

/// The version of RAM sections.
const RAM_VERSION: u32 = 4;

/// The most bytes of pages in a section, which QEMU loads in one piece: more only for a larger host
/// page.
const SECTION_BYTES: u64 = 256 << 10;

/// The most bytes that are read from memory at once.
const READ_BYTES: u64 = 64 << 10;

/// The memory of a paused guest, and what its destination lacks.
struct Sender {
    /// The memory of QEMU's process.
    memory: File,
    blocks: Vec<Block>,
}

/// A RAM block. Its host pages are sent whole, as QEMU places them.
struct Block {
    listed: Listed,
    /// Its name as the stream has it, after its length.
    counted_name: Vec<u8>,
    /// Host-virtual address in QEMU.
    address: u64,
    /// Whether the destination lacks a host page that was not sent yet.
    unsent: Mutex<Vec<bool>>,
}

/// Begins to send. QEMU's guest must have run elsewhere since it was paused here.
///
/// # Errors
/// QMP errors, that the guest runs here, and that the memory of the process is out of reach.
pub fn in_place_of(qmp: &mut Qmp) -> Result<LateStreams, QemuError> {
    let status = qmp.execute("query-status", json!({}))?;
    if status["running"] == true {
        return Err(QemuError::State {
            found: "running".into(),
            wanted: "paused. Another client has continued this guest, which belongs to another \
                     host: end this QEMU, and check the guest's disks",
        });
    }
    let pid = qmp.pid().ok_or_else(|| QemuError::Unseen { path: qmp.path().to_owned() })?;
    let memory = File::open(format!("/proc/{pid}/mem"));
    let action = "read the memory";
    let memory = memory.map_err(|source| QemuError::Process { action, pid, source })?;
    let blocks = located::list_with_addresses(qmp)?.into_iter().map(Block::new);
    let sender = Sender { memory, blocks: blocks.collect::<Result<_, _>>()? };
    let (requests, main) = state::pair()?;
    let (urgent, further) = state::pair()?;
    let failure = LateFailure::default();
    let failed = failure.clone();
    let send = move || {
        if let Err(source) = sender.send(&main, further) {
            let action = "send the pages that the destination lacks";
            failed.set(QemuError::Local { action, source }.into());
        }
        // The streams end when this thread drops its sockets.
    };
    let thread = std::thread::Builder::new().name("qemu-resend".into());
    thread.spawn(send).map_err(|source| QemuError::Local { action: "start a thread", source })?;
    Ok(LateStreams { requests, urgent: Some(urgent), failure })
}

impl Block {
    fn new(listed: Listed) -> Result<Self, QemuError> {
        let address = listed.address.ok_or_else(|| QemuError::Memory {
            block: listed.name.clone(),
            why: "is at an address that QEMU does not tell".into(),
        })?;
        let length = u8::try_from(listed.name.len()).map_err(|_| QemuError::Memory {
            block: listed.name.clone(),
            why: "has too long a name".into(),
        })?;
        let counted_name = [&[length][..], listed.name.as_bytes()].concat();
        Ok(Self { listed, counted_name, address, unsent: Mutex::default() })
    }

    /// The host pages of the part that is in use.
    fn host_pages(&self) -> u64 {
        self.listed.used.div_ceil(self.listed.page_bytes)
    }

    /// Whether the destination lacks a page that was not sent yet. From now on it counts as sent.
    fn take(&self, host_page: u64) -> bool {
        let mut unsent = self.unsent.lock();
        let page = usize::try_from(host_page).ok().and_then(|index| unsent.get_mut(index));
        page.is_some_and(std::mem::take)
    }
}

impl Sender {
    /// Sends all that the destination lacks. A page is sent once: QEMU takes no page twice.
    fn send(&self, main: &UnixStream, further: UnixStream) -> io::Result<()> {
        for block in &self.blocks {
            learn_unsent(main, block)?;
        }
        protocol::write_command(main, POSTCOPY_RESUME, &[])?;
        let (RESUME_ACK, _) = protocol::read_answer(main)? else {
            return Err(unknown("does not resume its post-copy"));
        };
        let further = Mutex::new(further);
        std::thread::scope(|scope| {
            let answer = || ending(main, self.answer_requests(main, &further));
            let thread = std::thread::Builder::new().name("qemu-requests".into());
            let answers = thread.spawn_scoped(scope, answer)?;
            let sent = ending(main, self.send_rest(main, &further));
            let answered = answers.join().unwrap_or_else(|_| Err(io::Error::other("a panic")));
            sent.and(answered)
        })
    }

    /// Sends what is requested, until the destination has every page.
    fn answer_requests(&self, main: &UnixStream, further: &Mutex<UnixStream>) -> io::Result<()> {
        // A request without a name means the block of the previous one.
        let mut block = None;
        let mut part = GuestBytes::new();
        loop {
            let (kind, body) = protocol::read_answer(main)?;
            let (start, bytes, name) = match (kind, &body[..]) {
                (SHUT, [0, 0, 0, 0]) => return Ok(()),
                (SHUT, _) => return Err(unknown("could not load its pages")),
                (REQUEST | REQUEST_OF_BLOCK, body) => {
                    request(body).ok_or_else(|| unknown("sends a request that is too short"))?
                }
                // Nothing else needs an answer.
                _ => continue,
            };
            if kind == REQUEST_OF_BLOCK {
                block = self.blocks.iter().find(|block| block.listed.name.as_bytes() == name);
            }
            let block = block.ok_or_else(|| unknown("requests a page of an unknown block"))?;
            let page_bytes = block.listed.page_bytes;
            let last = start.saturating_add(bytes).div_ceil(page_bytes).min(block.host_pages());
            // The end of this stream waits until a page that was taken is written.
            let further = further.lock();
            for host_page in start / page_bytes..last {
                if block.take(host_page) {
                    self.write_page(&further, block, host_page, &mut part)?;
                }
            }
        }
    }

    /// Sends the pages that nobody has requested, and the ends of both streams.
    fn send_rest(&self, mut main: &UnixStream, further: &Mutex<UnixStream>) -> io::Result<()> {
        let mut part = GuestBytes::new();
        for block in &self.blocks {
            let mut in_section = 0;
            for host_page in 0..block.host_pages() {
                if !block.take(host_page) {
                    continue;
                }
                if in_section == 0 {
                    main.write_all(&section_start())?;
                }
                self.write_page(main, block, host_page, &mut part)?;
                in_section += block.listed.page_bytes;
                if in_section >= SECTION_BYTES {
                    main.write_all(&section_end())?;
                    in_section = 0;
                }
            }
            if in_section > 0 {
                main.write_all(&section_end())?;
            }
        }
        further.lock().write_all(&EOS.to_be_bytes())?;
        main.write_all(&[END_OF_STREAM])
    }

    /// Writes a host page, as records of guest pages.
    fn write_page(
        &self,
        mut into: &UnixStream,
        block: &Block,
        host_page: u64,
        part: &mut GuestBytes,
    ) -> io::Result<()> {
        let Listed { used, page_bytes, .. } = &block.listed;
        let mut at = host_page * page_bytes;
        let end = (at + page_bytes).min(*used);
        let mut page = GuestBytes::new();
        page.extend_to(PAGE_SIZE);
        while at < end {
            part.clear();
            for offset in (at..end.min(at + READ_BYTES)).step_by(PAGE_SIZE) {
                self.memory.read_exact_at(&mut page, block.address + offset)?;
                let kind = if is_zero(&page) { ZERO } else { WHOLE };
                part.extend_from_slice(&(offset | kind).to_be_bytes());
                part.extend_from_slice(&block.counted_name);
                part.extend_from_slice(if kind == ZERO { &[0] } else { &page });
            }
            into.write_all(part)?;
            at += READ_BYTES;
        }
        Ok(())
    }
}

/// Asks which pages of a block have arrived.
fn learn_unsent(main: &UnixStream, block: &Block) -> io::Result<()> {
    let Listed { used, page_bytes, .. } = &block.listed;
    protocol::write_command(main, RECV_BITMAP, &block.counted_name)?;
    let (kind, name) = protocol::read_answer(main)?;
    if kind != BITMAP || name != block.counted_name {
        return Err(unknown("does not say which pages have arrived"));
    }
    let arrived = protocol::read_bitmap(main, used / PAGE_SIZE as u64)?;
    let lacks = |host_page: u64| {
        let page = host_page * (page_bytes / PAGE_SIZE as u64);
        let word = arrived.get((page / 64) as usize).copied().unwrap_or_default();
        word >> (page % 64) & 1 == 0
    };
    *block.unsent.lock() = (0..block.host_pages()).map(lacks).collect();
    Ok(())
}

/// A requested range in bytes, its start and its length, and the name of its block if the message
/// has one.
fn request(body: &[u8]) -> Option<(u64, u64, &[u8])> {
    let (start, rest) = body.split_first_chunk()?;
    let (bytes, rest) = rest.split_first_chunk()?;
    // The name's length is first.
    let name = rest.get(1..).unwrap_or_default();
    Some((u64::from_be_bytes(*start), u32::from_be_bytes(*bytes).into(), name))
}

/// A section of RAM that begins here gives itself a number. QEMU does not ask for one that is
/// known.
fn section_start() -> Vec<u8> {
    let name = b"ram";
    let (number, instance, version) = (SECTION.to_be_bytes(), [0; 4], RAM_VERSION.to_be_bytes());
    [&[SECTION_START], &number[..], &[name.len() as u8], name, &instance, &version].concat()
}

fn section_end() -> Vec<u8> {
    [&EOS.to_be_bytes()[..], &[SECTION_FOOTER], &SECTION.to_be_bytes()].concat()
}

/// A thread that has failed unblocks the other one.
fn ending(main: &UnixStream, done: io::Result<()>) -> io::Result<()> {
    done.inspect_err(|_| drop(main.shutdown(Shutdown::Both)))
}
