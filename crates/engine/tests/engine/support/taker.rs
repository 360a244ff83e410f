//! A simulated VMM that reads the streams of a carried guest at the destination.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::streamer::answer_to;
use vmferry::vmm::streamed::{LateEnd, LateStreams};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};

/// The destination's VMM.
#[derive(Default)]
pub struct Taker {
    /// The bytes read from each stream.
    pub taken: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Whether "the guest" runs.
    pub runs: Arc<AtomicBool>,
    /// Reading stops while this is set.
    pub stalls: Arc<AtomicBool>,
    /// It closes its sockets after this number of bytes.
    pub refuses_after: Option<usize>,
    /// It has loaded the guest after this number of bytes, and closes its sockets.
    pub loaded_after: Option<usize>,
    /// Called before the guest is loaded. It may take as long as a slow VMM does.
    pub on_load: Option<Box<dyn FnMut() + Send>>,
    pub readers: Vec<JoinHandle<()>>,
    /// It makes this number of requests when the guest runs, with post-copy.
    pub requests: Option<u64>,
    /// Streams of post-copy.
    pub late: Option<Late>,
}

/// The streams of post-copy.
pub struct Late {
    /// The engine's ends, until it takes them.
    theirs: Option<LateStreams>,
    /// Our ends: requests are written, and answers are read.
    requests: UnixStream,
    answers: UnixStream,
}

impl DestinationVm for Taker {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let mut sockets = Vec::new();
        *self.taken.lock().unwrap() = vec![Vec::new(); usize::from(guest.config[0])];
        for number in 0..usize::from(guest.config[0]) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            if self.requests.is_some() {
                let (answers, urgent) = UnixStream::pair().unwrap();
                let requests = theirs.try_clone().unwrap();
                let theirs = Some(LateStreams::new(requests, Some(urgent)));
                let requests = ours.try_clone().unwrap();
                self.late = Some(Late { theirs, requests, answers });
            }
            sockets.push(theirs);
            let (taken, stalls) = (Arc::clone(&self.taken), Arc::clone(&self.stalls));
            let most = self.refuses_after.or(self.loaded_after).unwrap_or(usize::MAX);
            self.readers
                .push(std::thread::spawn(move || take(ours, number, &taken, &stalls, most)));
        }
        Ok(Landing::Streams(sockets))
    }

    fn takes_post_copy(&self) -> Result<(), VmError> {
        match self.requests {
            Some(_) => Ok(()),
            None => Err("it has no post-copy".into()),
        }
    }

    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        let theirs = self.late.as_mut().and_then(|late| late.theirs.take());
        theirs.ok_or_else(|| "they were taken".into())
    }

    fn late_end(&mut self) -> Result<LateEnd, VmError> {
        Ok(LateEnd::Complete)
    }

    fn load(&mut self, _state: &[u8]) -> Result<(), VmError> {
        if let Some(on_load) = &mut self.on_load {
            on_load();
        }
        if self.late.as_ref().is_some_and(|late| late.theirs.is_none()) {
            return Ok(());
        }
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
        if self.refuses_after.is_some() { Err("section `cpu` is damaged".into()) } else { Ok(()) }
    }

    fn discard(&mut self) {
        self.late = None;
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.runs.store(true, Ordering::SeqCst);
        if let Some(late) = self.late.take_if(|late| late.theirs.is_none()) {
            let count = self.requests.unwrap_or(0);
            self.readers.push(std::thread::spawn(move || request_all(late, count)));
        }
        Ok(())
    }
}

/// Requests page after page, as a guest does, and says at last that nothing more is needed.
fn request_all(mut late: Late, count: u64) {
    let mut page = vec![0; vmferry_memory::PAGE_SIZE];
    for number in 0..count {
        late.requests.write_all(&number.to_be_bytes()).unwrap();
        late.answers.read_exact(&mut page).unwrap();
        assert!(page == answer_to(number), "another page came for {number}");
    }
    late.requests.write_all(&u64::MAX.to_be_bytes()).unwrap();
    late.requests.shutdown(std::net::Shutdown::Write).unwrap();
}

fn take(
    mut socket: UnixStream,
    number: usize,
    taken: &Mutex<Vec<Vec<u8>>>,
    stalls: &AtomicBool,
    most: usize,
) {
    let mut bytes = vec![0; 70_000];
    loop {
        while stalls.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        match socket.read(&mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(read) => {
                let mut taken = taken.lock().unwrap();
                taken[number].extend_from_slice(&bytes[..read]);
                if taken[number].len() > most {
                    return;
                }
            }
        }
    }
}
