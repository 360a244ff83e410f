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
    /// `write` of the head, `write` of the pages.
    Write,
    /// `sendmsg` with `MSG_ZEROCOPY`.
    ZeroCopy,
    /// io_uring's `SEND`, or its `SEND_ZC`.
    Ring {
        /// Which of the two.
        zero_copy: bool,
    },
    /// rustls, and `write` of what it makes.
    Tls(Batch),
}

/// How much plaintext is encrypted before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// At most 256 KiB of one frame, gathered in one buffer, as the engine does: of a frame of 256 KiB a few
    /// bytes are left over, which go by themselves.
    Cut,
    /// A whole frame, gathered in one buffer too.
    Frame,
    /// So many bytes, whichever frames they belong to, straight from rustls's records.
    Bytes(usize),
}

/// Options of the sockets; what is not here is as the system has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// `SO_SNDBUF` of the sender.
    pub send_bytes: Option<usize>,
    /// `SO_RCVBUF` of the receiver.
    pub receive_bytes: Option<usize>,
    /// `TCP_NOTSENT_LOWAT` of the sender.
    pub unsent_bytes: Option<i32>,
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

    const fn tls(name: &'static str, batch: Batch) -> Self {
        Self::new(name, Call::Tls(batch))
    }

    /// Whether it encrypts. Ways that do are compared with the first of them, the others with the very first.
    pub fn is_tls(&self) -> bool {
        matches!(self.call, Call::Tls(_))
    }
}

const SMALL: Option<usize> = Some(512 << 10);

/// All of them.
pub const WAYS: [Way; 23] = [
    Way::new("writev (vmferry's call)", Call::Writev),
    Way::new("write twice", Call::Write),
    Way::buffers("writev, SO_SNDBUF 512 KiB", SMALL, None),
    Way::buffers("writev, SO_SNDBUF 4 MiB", Some(4 << 20), None),
    Way::buffers("writev, SO_RCVBUF 512 KiB", None, SMALL),
    Way::buffers("writev, SO_RCVBUF 8 MiB", None, Some(8 << 20)),
    Way::buffers("writev, SO_SNDBUF and SO_RCVBUF 512 KiB", SMALL, SMALL),
    Way::buffers("writev, SO_SNDBUF 4 MiB, SO_RCVBUF 8 MiB", Some(4 << 20), Some(8 << 20)),
    Way::tuned(
        "writev, TCP_NOTSENT_LOWAT 256 KiB",
        Tuning { unsent_bytes: Some(256 << 10), ..Tuning::NONE },
    ),
    Way::new("sendmsg, MSG_ZEROCOPY", Call::ZeroCopy),
    Way::new("io_uring SEND, 4 linked", Call::Ring { zero_copy: false }),
    Way::new("io_uring SEND_ZC, 4 linked", Call::Ring { zero_copy: true }),
    Way::frames("writev, frames of 64 KiB", 16),
    Way::frames("writev, frames of 128 KiB", 32),
    Way::frames("writev, frames of 512 KiB", 128),
    // As many as the engine has out over a short link, and as many as have the bytes of 16 frames of 64 KiB: what is
    // out is what the next copy does not find in the cache.
    Way::window("writev, 6 frames out (vmferry's window)", 6),
    Way::window("writev, 4 frames out", 4),
    Way::tls("TLS, 256 KiB of a frame, the rest (vmferry)", Batch::Cut),
    Way::tls("TLS, a frame at once", Batch::Frame),
    Way::tls("TLS, batches of 16 KiB", Batch::Bytes(16 << 10)),
    Way::tls("TLS, batches of 64 KiB", Batch::Bytes(64 << 10)),
    Way::tls("TLS, batches of 256 KiB", Batch::Bytes(256 << 10)),
    Way::tls("TLS, batches of 1 MiB", Batch::Bytes(1 << 20)),
];
