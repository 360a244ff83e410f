//! A simulated VMM that reads the streams of a carried guest at the destination.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

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
    pub readers: Vec<JoinHandle<()>>,
}

impl DestinationVm for Taker {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let mut sockets = Vec::new();
        *self.taken.lock().unwrap() = vec![Vec::new(); usize::from(guest.config[0])];
        for number in 0..usize::from(guest.config[0]) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            sockets.push(theirs);
            let (taken, stalls) = (Arc::clone(&self.taken), Arc::clone(&self.stalls));
            let most = self.refuses_after.or(self.loaded_after).unwrap_or(usize::MAX);
            self.readers
                .push(std::thread::spawn(move || take(ours, number, &taken, &stalls, most)));
        }
        Ok(Landing::Streams(sockets))
    }

    fn load(&mut self, _state: &[u8]) -> Result<(), VmError> {
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
        if self.refuses_after.is_some() { Err("section `cpu` is damaged".into()) } else { Ok(()) }
    }

    fn discard(&mut self) {
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }
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
