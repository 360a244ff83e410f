//! The processes that ask.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmferry::witness::{Register, Witness, WitnessId, WitnessRequest};
use vmferry_handover::{GuestIdentity, SessionId, VmError};
use vmferry_transport::connect_unix;

use super::{HostRequest, MAX_LINE_BYTES, Question, Reply};

/// How long an answer may take: longer than the server waits for its store.
const TIMEOUT: Duration = Duration::from_millis(2500);

/// Why a witness at a socket has not answered.
#[derive(Debug, thiserror::Error)]
pub enum WitnessSocketError {
    /// No process answers there.
    #[error("no process provides a witness at {path}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The answer is none to the question.
    #[error("the witness at {path} gave no answer that this release understands")]
    BadAnswer {
        /// The socket.
        path: PathBuf,
    },
    /// The witness can't answer.
    #[error("the witness at {path}: {reason}")]
    Refused {
        /// The socket.
        path: PathBuf,
        /// What it says.
        reason: String,
    },
    /// Only the process that provides the witness may ask for this.
    #[error("a report or a fencing can't be asked for at a socket")]
    NotForHosts,
}

/// A witness that another process of this host provides.
#[derive(Clone, Debug)]
pub struct SocketWitness {
    path: PathBuf,
    id: WitnessId,
}

impl SocketWitness {
    /// Learns the name of the witness at the socket.
    ///
    /// # Errors
    /// No process answers there.
    pub fn connect(path: &Path) -> Result<Self, WitnessSocketError> {
        match call(path, &Question::Name)? {
            Reply::Name(id) => Ok(Self { path: path.to_owned(), id }),
            reply => Err(no_answer(path, reply)),
        }
    }

    /// The witness of a session that began earlier. The process that provides it may be absent.
    #[must_use]
    pub fn named(path: &Path, id: WitnessId) -> Self {
        Self { path: path.to_owned(), id }
    }

    fn register(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, WitnessSocketError> {
        let request = match request {
            None => None,
            Some(WitnessRequest::Claim) => Some(HostRequest::Claim),
            Some(WitnessRequest::TakeBack) => Some(HostRequest::TakeBack),
            Some(WitnessRequest::Open | WitnessRequest::Free | WitnessRequest::Report(_)) => {
                return Err(WitnessSocketError::NotForHosts);
            }
        };
        self.call(&Question::Register { witness: self.id.clone(), session, request })
    }

    fn call(&self, question: &Question) -> Result<Register, WitnessSocketError> {
        match call(&self.path, question)? {
            Reply::Register(register) => Ok(register),
            reply => Err(no_answer(&self.path, reply)),
        }
    }
}

impl Witness for SocketWitness {
    fn id(&self) -> WitnessId {
        self.id.clone()
    }

    fn open(&self, session: SessionId, guest: &GuestIdentity) -> Result<Register, VmError> {
        let (witness, guest) = (self.id.clone(), guest.clone());
        Ok(self.call(&Question::Open { witness, session, guest })?)
    }

    fn ask(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, VmError> {
        Ok(self.register(session, request)?)
    }
}

fn no_answer(path: &Path, reply: Reply) -> WitnessSocketError {
    let path = path.to_owned();
    match reply {
        Reply::Error(reason) => WitnessSocketError::Refused { path, reason },
        Reply::Name(_) | Reply::Register(_) => WitnessSocketError::BadAnswer { path },
    }
}

fn call(path: &Path, question: &Question) -> Result<Reply, WitnessSocketError> {
    let line = ask(path, question)
        .map_err(|source| WitnessSocketError::Unreachable { path: path.to_owned(), source })?;
    serde_json::from_slice(&line)
        .map_err(|_| WitnessSocketError::BadAnswer { path: path.to_owned() })
}

fn ask(path: &Path, question: &Question) -> io::Result<Vec<u8>> {
    let mut stream = connect_unix(path, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    line.clear();
    BufReader::new(stream.take(MAX_LINE_BYTES)).read_until(b'\n', &mut line)?;
    match line.ends_with(b"\n") {
        true => Ok(line),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
