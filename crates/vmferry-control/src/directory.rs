//! Where the control sockets and journals of this host's guests are.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The directory that guests of this user are found in by name.
#[derive(Clone, Debug)]
pub struct RuntimeDirectory(PathBuf);

/// `$VMFERRY_RUNTIME_DIR`, or `vmferry` in `$XDG_RUNTIME_DIR`, or `/run/vmferry` for root and
/// `/tmp/vmferry-UID` for others. It is made with mode 0700.
///
/// # Errors
/// If it can't be made, or belongs to someone else.
pub fn runtime_directory() -> io::Result<RuntimeDirectory> {
    let uid = rustix::process::getuid().as_raw();
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let path = if let Some(path) = from("VMFERRY_RUNTIME_DIR") {
        PathBuf::from(path)
    } else if let Some(path) = from("XDG_RUNTIME_DIR") {
        Path::new(&path).join("vmferry")
    } else if uid == 0 {
        PathBuf::from("/run/vmferry")
    } else {
        PathBuf::from(format!("/tmp/vmferry-{uid}"))
    };
    RuntimeDirectory::at(path)
}

impl RuntimeDirectory {
    /// A directory of the caller's choice, made with mode 0700 if it is missing.
    ///
    /// # Errors
    /// If it can't be made, or belongs to someone else.
    pub fn at(path: PathBuf) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let owner = std::fs::metadata(&path)?.uid();
        // In a directory of someone else's, a socket could be exchanged under our name.
        if owner == rustix::process::getuid().as_raw() {
            Ok(Self(path))
        } else {
            let text = format!("{} belongs to user {owner}", path.display());
            Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
        }
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the journals are kept.
    #[must_use]
    pub fn journals(&self) -> PathBuf {
        self.0.join("journal")
    }

    /// The control socket of a guest by name; a name with a `/` is the path of one.
    #[must_use]
    pub fn socket(&self, guest: &str) -> PathBuf {
        if guest.contains('/') {
            PathBuf::from(guest)
        } else {
            self.0.join(format!("{guest}.sock"))
        }
    }

    /// The names of the guests whose sockets are here, whether or not they live.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn guests(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.0)? {
            let name = entry?.file_name();
            if let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".sock")) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }
}
