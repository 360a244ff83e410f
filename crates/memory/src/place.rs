//! Where guest memory is allocated from, as text for messages.

use std::fmt;
use std::path::PathBuf;

/// A place that memory is allocated from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file system of a file: a tmpfs, usually.
    FileSystem {
        /// A file on it.
        path: PathBuf,
        /// Its size in bytes.
        total_bytes: u64,
    },
    /// The host's pool of huge pages.
    HugePages {
        /// Bytes of each huge page.
        page_bytes: u64,
        /// The file on hugetlbfs.
        path: PathBuf,
    },
    /// A control group of this process.
    ControlGroup {
        /// Its directory.
        path: PathBuf,
        /// Its limit in bytes.
        limit_bytes: u64,
    },
    /// The host's memory and swap.
    Host,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FileSystem { path, total_bytes } => {
                let (path, total) = (path.display(), Bytes(*total_bytes));
                write!(f, "the file system of {path} ({total})")
            }
            Self::HugePages { page_bytes, path } => {
                let (path, page) = (path.display(), Bytes(*page_bytes));
                write!(f, "the host's pool of huge pages of {page}, for {path},")
            }
            Self::ControlGroup { path, limit_bytes } => {
                let (path, limit) = (path.display(), Bytes(*limit_bytes));
                write!(f, "the control group {path} (limit {limit})")
            }
            Self::Host => f.write_str("this host's memory and swap"),
        }
    }
}

/// A number of bytes, formatted for people.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..0x10_0000 => write!(f, "{:.0} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", bytes / f64::from(1 << 20)),
            _ => write!(f, "{:.1} GiB", bytes / f64::from(1 << 30)),
        }
    }
}
