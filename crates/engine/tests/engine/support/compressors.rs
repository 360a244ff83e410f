//! Compressors that fail, and compressors that block for as long as a test wants.

use std::sync::{Arc, Condvar, Mutex};

use vmferry_codec::{Compress, CompressError, Compressors, Method};

/// A compressor that fails at a certain call, counted over all workers.
struct Breaking {
    inner: Box<dyn Compress>,
    method: Method,
    calls: Arc<Mutex<u32>>,
    last: u32,
}

impl Compress for Breaking {
    fn compress(
        &mut self,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<Option<usize>, CompressError> {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        if *calls >= self.last {
            let reason = "the card is on fire".to_owned();
            return Err(CompressError::Failed { method: self.method, reason });
        }
        drop(calls);
        self.inner.compress(input, output)
    }
}

/// Compressors that fail at their `last` call, counted over all workers, and at all later ones.
pub fn breaking(last: u32) -> Compressors {
    let calls = Arc::default();
    Compressors::new(move |method| {
        let inner = Compressors::default().make(method)?;
        Ok(Box::new(Breaking { inner, method, calls: Arc::clone(&calls), last }))
    })
}

/// Blocks compressors until the test releases them.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<GateState>, Condvar)>);

#[derive(Default)]
struct GateState {
    waiting: usize,
    passed: usize,
    /// Number of calls that may pass.
    open: usize,
}

impl Gate {
    fn pass(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap();
        state.waiting += 1;
        changed.notify_all();
        while state.passed >= state.open {
            state = changed.wait(state).unwrap();
        }
        state.passed += 1;
        state.waiting -= 1;
    }

    /// Lets this number of calls pass, counted from the start.
    pub fn open(&self, calls: usize) {
        let (state, changed) = &*self.0;
        state.lock().unwrap().open = calls;
        changed.notify_all();
    }

    /// Waits until this number of compressors is blocked at the same time.
    pub fn await_waiting(&self, compressors: usize) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap();
        while state.waiting < compressors {
            state = changed.wait(state).unwrap();
        }
    }

    /// Compressors that all wait at the gate in each call.
    pub fn holds_all(&self) -> Compressors {
        struct Gated(Gate, Box<dyn Compress>);
        impl Compress for Gated {
            fn compress(
                &mut self,
                input: &[u8],
                output: &mut [u8],
            ) -> Result<Option<usize>, CompressError> {
                self.0.pass();
                self.1.compress(input, output)
            }
        }
        let gate = self.clone();
        Compressors::new(move |method| {
            Ok(Box::new(Gated(gate.clone(), Compressors::default().make(method)?)))
        })
    }

    /// Compressors of which only the first one constructed waits at the gate, once.
    pub fn holds_first(&self) -> Compressors {
        struct Held(Option<Gate>, Box<dyn Compress>);
        impl Compress for Held {
            fn compress(
                &mut self,
                input: &[u8],
                output: &mut [u8],
            ) -> Result<Option<usize>, CompressError> {
                if let Some(gate) = self.0.take() {
                    gate.pass();
                }
                self.1.compress(input, output)
            }
        }
        let first = Mutex::new(Some(self.clone()));
        Compressors::new(move |method| {
            let gate = first.lock().unwrap().take();
            Ok(Box::new(Held(gate, Compressors::default().make(method)?)))
        })
    }
}
