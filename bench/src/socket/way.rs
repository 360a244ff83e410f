//! The ways that are compared.

/// One of them.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// How the tables call it.
    pub name: &'static str,
    /// What hands the frames over.
    pub call: Call,
    /// What the sockets are told before they are connected.
    pub tuning: Tuning,
    /// Pages of a frame.
    pub frame_pages: u64,
    /// Most frames that a channel has out.
    pub most_out: usize,
}

/// What hands a frame to the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `writev` of head and pages.
    Writev,
    /// The same in calls of at most so many bytes.
    Pieces(usize),
    /// `write` of the head, `write` of the pages.
    Write,
    /// `sendmsg` with `MSG_ZEROCOPY`.
    ZeroCopy,
    /// io_uring's `SEND`, or its `SEND_ZC`.
    Ring {
        /// Which of the two.
        zero_copy: bool,
    },
    /// rustls, and `writev` of the records whenever so much plaintext is encrypted, whichever frames it belongs to.
    Tls(usize),
}

/// Options of the sockets; what is not here is as the system has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// `SO_SNDBUF` of the sender.
    pub send_bytes: Option<usize>,
    /// `SO_RCVBUF` of the receiver.
    pub receive_bytes: Option<usize>,
    /// `TCP_NOTSENT_LOWAT` of the sender.
    pub unsent_bytes: Option<u32>,
}

impl Tuning {
    /// As the system has it.
    pub const NONE: Self = Self { send_bytes: None, receive_bytes: None, unsent_bytes: None };
}

impl Way {
    const fn new(name: &'static str, call: Call) -> Self {
        Self { name, call, tuning: Tuning::NONE, frame_pages: 64, most_out: 16 }
    }

    const fn tuned(name: &'static str, tuning: Tuning) -> Self {
        Self { tuning, ..Self::new(name, Call::Writev) }
    }

    const fn buffers(name: &'static str, send: Option<usize>, receive: Option<usize>) -> Self {
        Self::tuned(name, Tuning { send_bytes: send, receive_bytes: receive, unsent_bytes: None })
    }

    const fn frames(name: &'static str, frame_pages: u64) -> Self {
        Self { frame_pages, ..Self::new(name, Call::Writev) }
    }

    const fn window(name: &'static str, most_out: usize) -> Self {
        Self { most_out, ..Self::new(name, Call::Writev) }
    }

    const fn pieces(name: &'static str, bytes: usize) -> Self {
        Self::new(name, Call::Pieces(bytes))
    }

    const fn tls(name: &'static str, batch: usize) -> Self {
        Self::new(name, Call::Tls(batch))
    }

    /// Whether it encrypts. Ways that do are compared with the first of them, the others with the very first.
    pub fn is_tls(&self) -> bool {
        matches!(self.call, Call::Tls(_))
    }
}

const SMALL: Option<usize> = Some(512 << 10);

const UNSENT: Tuning = Tuning { unsent_bytes: Some(256 << 10), ..Tuning::NONE };

/// All of them.
pub const WAYS: [Way; 26] = [
    Way::new("writev", Call::Writev),
    Way::new("write twice", Call::Write),
    Way::pieces("writev, 32 KiB a call", 32 << 10),
    Way::pieces("writev, 60 KiB a call", 60 << 10),
    Way::pieces("writev, 128 KiB a call", 128 << 10),
    Way::tuned("writev, TCP_NOTSENT_LOWAT 256 KiB", UNSENT),
    Way {
        tuning: UNSENT,
        ..Way::pieces("writev, 60 KiB a call, NOTSENT_LOWAT (vmferry)", 60 << 10)
    },
    Way::buffers("writev, SO_SNDBUF 512 KiB", SMALL, None),
    Way::buffers("writev, SO_SNDBUF 4 MiB", Some(4 << 20), None),
    Way::buffers("writev, SO_RCVBUF 512 KiB", None, SMALL),
    Way::buffers("writev, SO_RCVBUF 8 MiB", None, Some(8 << 20)),
    Way::buffers("writev, SO_SNDBUF and SO_RCVBUF 512 KiB", SMALL, SMALL),
    Way::buffers("writev, SO_SNDBUF 4 MiB, SO_RCVBUF 8 MiB", Some(4 << 20), Some(8 << 20)),
    Way::new("sendmsg, MSG_ZEROCOPY", Call::ZeroCopy),
    Way::new("io_uring SEND, 4 linked", Call::Ring { zero_copy: false }),
    Way::new("io_uring SEND_ZC, 4 linked", Call::Ring { zero_copy: true }),
    Way::frames("writev, frames of 64 KiB", 16),
    Way::frames("writev, frames of 128 KiB", 32),
    Way::frames("writev, frames of 512 KiB", 128),
    // What is out is what the next copy does not find in the cache.
    Way::window("writev, 4 frames out", 4),
    Way::tls("TLS, batches of 256 KiB", 256 << 10),
    Way::tls("TLS, batches of 16 KiB", 16 << 10),
    Way::tls("TLS, batches of 32 KiB", 32 << 10),
    Way::tls("TLS, batches of 48 KiB (vmferry)", 48 << 10),
    Way::tls("TLS, batches of 64 KiB", 64 << 10),
    Way::tls("TLS, batches of 1 MiB", 1 << 20),
];
