//! The directories of control sockets and journals.
//!
//! Journals hold promises, so they are on disk, in one place per user. That place does not depend
//! on how the user's process was started: by a login, `sudo`, a timer or a service. Control sockets
//! matter only while their processes live.

mod private;

use std::io;
use std::path::{Path, PathBuf};

use private::{check_journals, check_private, make_private};

/// Names the directory of the sockets, and of the journals unless [`STATE`] is set.
const RUNTIME: &str = "VMFERRY_RUNTIME_DIR";

/// Names the directory that holds the `journal` directory.
const STATE: &str = "VMFERRY_STATE_DIR";

/// A directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory could not be created, opened or synced.
    #[error("can't {action} the directory {path}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The directory.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The path is a symbolic link. A user who can change the link could redirect the directory.
    #[error("{path} is a symbolic link: name the directory that it leads to")]
    Link {
        /// The link.
        path: PathBuf,
    },
    /// The path is not a directory.
    #[error("{path} is not a directory")]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// The directory belongs to another user, who could replace its content.
    #[error("{path} belongs to user {owner}, and this process runs as user {user}")]
    Owner {
        /// The directory.
        path: PathBuf,
        /// The owner's user ID.
        owner: u32,
        /// This process's user ID.
        user: u32,
    },
    /// Other users may read or change the directory.
    #[error(
        "{path} has mode {mode:04o}, so other users can access its content: check its files, then \
        `chmod {wanted:04o}`"
    )]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// The mode that it must have.
        wanted: u32,
    },
    /// Other users may replace the directory.
    #[error(
        "{path} is not safe: users other than this user and root can change {above} (user \
        {owner}, mode {mode:04o}), which contains it"
    )]
    Above {
        /// The parent directory that they can write to.
        above: PathBuf,
        /// The requested directory.
        path: PathBuf,
        /// The owner of the parent directory.
        owner: u32,
        /// The mode of the parent directory.
        mode: u32,
    },
    /// The user has no directory on disk.
    #[error(
        "user {user} has no home directory, and neither VMFERRY_STATE_DIR nor XDG_STATE_HOME is set"
    )]
    NoHome {
        /// The user ID.
        user: u32,
    },
}

/// The directories of one user's guests on this host.
#[derive(Clone, Debug)]
pub struct Directories {
    runtime: PathBuf,
    state: PathBuf,
    older: Vec<PathBuf>,
}

/// The parts of a process's environment that decide the directories.
#[derive(Default)]
struct Environment {
    user: u32,
    runtime: Option<PathBuf>,
    state: Option<PathBuf>,
    xdg_runtime: Option<PathBuf>,
    xdg_state: Option<PathBuf>,
    home: Option<PathBuf>,
}

impl Environment {
    fn of_this_process() -> Self {
        let from = |name: &str| {
            std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
        };
        // The XDG base directory specification says to ignore relative paths.
        let absolute = |name: &str| from(name).filter(|path| path.is_absolute());
        Self {
            user: rustix::process::geteuid().as_raw(),
            runtime: from(RUNTIME),
            state: from(STATE),
            xdg_runtime: absolute("XDG_RUNTIME_DIR"),
            xdg_state: absolute("XDG_STATE_HOME"),
            home: std::env::home_dir().filter(|path| path.is_absolute()),
        }
    }

    fn directories(self) -> Result<Directories, DirectoryError> {
        if let Some(runtime) = self.runtime {
            let state = self.state.unwrap_or_else(|| runtime.clone());
            return Ok(Directories { runtime, state, older: Vec::new() });
        }
        let login_runtime = self.xdg_runtime.map(|path| path.join("vmferry"));
        let user_state = self.xdg_state.or(self.home.map(|home| home.join(".local/state")));
        let older = match self.state {
            Some(_) => Vec::new(),
            None => earlier_state_directories(self.user, login_runtime.as_deref()),
        };
        let state = match (self.state, user_state) {
            (Some(state), _) => state,
            (None, _) if self.user == 0 => "/var/lib/vmferry".into(),
            (None, Some(user_state)) => user_state.join("vmferry"),
            (None, None) => return Err(DirectoryError::NoHome { user: self.user }),
        };
        // The login's directory is removed when the user's last session ends, so root's sockets are
        // never there.
        let runtime = match login_runtime {
            _ if self.user == 0 => "/run/vmferry".into(),
            Some(login_runtime) => login_runtime,
            None => state.clone(),
        };
        Ok(Directories { runtime, state, older })
    }
}

/// Where earlier releases kept the journals of a user who had set none of vmferry's variables.
fn earlier_state_directories(user: u32, login_runtime: Option<&Path>) -> Vec<PathBuf> {
    let mut places = vec![Path::new("/run/user").join(user.to_string()).join("vmferry")];
    if user == 0 {
        places.push("/run/vmferry".into());
    } else {
        places.push(format!("/tmp/vmferry-{user}").into());
    }
    places.extend(login_runtime.map(Path::to_owned));
    places.sort();
    places.dedup();
    places
}

impl Directories {
    /// The directories of this process's user. Nothing is created; existing directories are
    /// checked.
    ///
    /// Sockets are in `$VMFERRY_RUNTIME_DIR`. Without it, root uses `/run/vmferry`, and other users
    /// use `$XDG_RUNTIME_DIR/vmferry`, or the state directory if that variable is not set.
    ///
    /// Journals are in the directory `journal` of `$VMFERRY_STATE_DIR`, or else of
    /// `$VMFERRY_RUNTIME_DIR`. Without either, root uses `/var/lib/vmferry`, and other users use
    /// `$XDG_STATE_HOME/vmferry`, where `XDG_STATE_HOME` defaults to `~/.local/state`.
    ///
    /// # Errors
    /// A directory belongs to another user, or others can read or change it, or the user has no
    /// directory on disk.
    pub fn of_this_user() -> Result<Self, DirectoryError> {
        Environment::of_this_process().directories()?.checked()
    }

    /// Directories chosen by the caller.
    ///
    /// # Errors
    /// As [`of_this_user`](Self::of_this_user).
    pub fn at(runtime: PathBuf, state: PathBuf) -> Result<Self, DirectoryError> {
        Self { runtime, state, older: Vec::new() }.checked()
    }

    fn checked(self) -> Result<Self, DirectoryError> {
        let exists = |path: &Path| path.symlink_metadata().is_ok();
        let check = |path: PathBuf| if exists(&path) { check_private(&path) } else { Ok(path) };
        let checked =
            Self { runtime: check(self.runtime)?, state: check(self.state)?, older: self.older };
        if exists(&checked.journals()) {
            check_journals(&checked.journals())?;
        }
        Ok(checked)
    }

    /// Creates missing directories durably, with mode 0700.
    ///
    /// # Errors
    /// As [`of_this_user`](Self::of_this_user), and if a directory cannot be created.
    pub fn prepare(self) -> Result<Self, DirectoryError> {
        make_private(&self.runtime)?;
        make_private(&self.journals())?;
        self.checked()
    }

    /// The directory of control sockets.
    #[must_use]
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The directory that holds the journals' directory.
    #[must_use]
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// The directory of the journals.
    #[must_use]
    pub fn journals(&self) -> PathBuf {
        self.state.join("journal")
    }

    /// State directories of earlier releases that may hold journals of this user. Only existing
    /// directories that no other user can change are returned.
    #[must_use]
    pub fn older(&self) -> Vec<PathBuf> {
        let is_usable = |path: &&PathBuf| {
            check_private(path).is_ok_and(|path| path != self.state)
                && path.join("journal").is_dir()
                && check_journals(&path.join("journal")).is_ok()
        };
        self.older.iter().filter(is_usable).cloned().collect()
    }

    /// The control socket of a guest. A name with a `/` is the path of a socket.
    #[must_use]
    pub fn socket(&self, guest: &str) -> PathBuf {
        if guest.contains('/') {
            PathBuf::from(guest)
        } else {
            self.runtime.join(format!("{guest}.sock"))
        }
    }

    /// The names of the guests that have sockets here, including dead ones.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn guests(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        let entries = match std::fs::read_dir(&self.runtime) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(names),
            entries => entries?,
        };
        for entry in entries {
            let name = entry?.file_name();
            if let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".sock")) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(environment: Environment) -> (String, String) {
        let Directories { runtime, state, .. } = environment.directories().unwrap();
        (runtime.display().to_string(), state.display().to_string())
    }

    fn some(path: &str) -> Option<PathBuf> {
        Some(path.into())
    }

    #[test]
    fn root_has_one_journal_directory_with_and_without_a_login() {
        let cron = places(Environment::default());
        assert_eq!(cron, ("/run/vmferry".into(), "/var/lib/vmferry".into()));
        let login = Environment {
            xdg_runtime: some("/run/user/0"),
            xdg_state: some("/home/admin/.state"),
            home: some("/home/admin"),
            ..Environment::default()
        };
        assert_eq!(places(login), cron);
    }

    #[test]
    fn user_journals_survive_a_logout() {
        let user = || Environment {
            user: 1000,
            xdg_runtime: some("/run/user/1000"),
            home: some("/home/u"),
            ..Environment::default()
        };
        let state = "/home/u/.local/state/vmferry";
        assert_eq!(places(user()), ("/run/user/1000/vmferry".into(), state.into()));
        let cron = Environment { xdg_runtime: None, ..user() };
        assert_eq!(places(cron), (state.into(), state.into()), "never below /tmp");
        let xdg = Environment { xdg_state: some("/s"), ..user() };
        assert_eq!(places(xdg).1, "/s/vmferry");
        let homeless = Environment { user: 1000, ..Environment::default() };
        assert!(matches!(homeless.directories(), Err(DirectoryError::NoHome { user: 1000 })));
    }

    #[test]
    fn vmferry_variables_take_precedence() {
        let of = |runtime, state| {
            places(Environment {
                runtime,
                state,
                xdg_runtime: some("/run/user/0"),
                ..Environment::default()
            })
        };
        // As in earlier releases: one variable for both.
        assert_eq!(of(some("/a"), None), ("/a".into(), "/a".into()));
        assert_eq!(of(some("/a"), some("/b")), ("/a".into(), "/b".into()));
        assert_eq!(of(None, some("/b")), ("/run/vmferry".into(), "/b".into()));
    }
}
