//! The methods that are compared.

/// A method to send frames.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// The name in tables.
    pub name: &'static str,
    /// The call that sends frames.
    pub call: Call,
    /// Socket options, set before the sockets are connected.
    pub tuning: Tuning,
    /// Pages per frame.
    pub frame_pages: u64,
    /// Maximum unacknowledged frames per channel.
    pub most_out: usize,
}

/// The call that sends a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `writev` of head and pages.
    Writev,
    /// `writev` in calls of at most this many bytes.
    Pieces(usize),
    /// `write` of the head, `write` of the pages.
    Write,
    /// `sendmsg` with `MSG_ZEROCOPY`.
    ZeroCopy,
    /// io_uring's `SEND`, or its `SEND_ZC`.
    Ring {
        /// Whether `SEND_ZC` is used.
        zero_copy: bool,
    },
    /// rustls, and `writev` of the records whenever this much plaintext is encrypted, across frame
    /// boundaries.
    Tls(usize),
}

/// Socket options. `None` leaves the system's default.
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
    /// The system's defaults.
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

    /// Whether the method encrypts. Encrypting methods are compared with the first of their kind,
    /// all others with the very first method.
    pub fn is_tls(&self) -> bool {
        matches!(self.call, Call::Tls(_))
    }
}

const SMALL: Option<usize> = Some(512 << 10);

const UNSENT: Tuning = Tuning { unsent_bytes: Some(256 << 10), ..Tuning::NONE };

/// All methods.
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
    // More unacknowledged frames leave less of the cache for the next copy.
    Way::window("writev, 4 frames out", 4),
    Way::tls("TLS, batches of 256 KiB", 256 << 10),
    Way::tls("TLS, batches of 16 KiB", 16 << 10),
    Way::tls("TLS, batches of 32 KiB", 32 << 10),
    Way::tls("TLS, batches of 48 KiB (vmferry)", 48 << 10),
    Way::tls("TLS, batches of 64 KiB", 64 << 10),
    Way::tls("TLS, batches of 1 MiB", 1 << 20),
];
