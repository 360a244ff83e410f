//! Where the control sockets and the journals of this host's guests are.
//!
//! Journals are promises, so they are on a disk, in one place for each user, whichever way that
//! user has come to the host: by a login, `sudo`, a timer or a service. Control sockets are only of
//! use while their processes live.

mod private;

use std::io;
use std::path::{Path, PathBuf};

use private::{check_journals, check_private, make_private};

/// The directory of both: sockets, and journals unless [`STATE`] names another one for these.
const RUNTIME: &str = "VMFERRY_RUNTIME_DIR";

/// The directory that `journal` is in.
const STATE: &str = "VMFERRY_STATE_DIR";

/// Why a directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It could not be made, opened or synced.
    #[error("can't {action} the directory {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A user who can change the link would decide where the directory is.
    #[error("{path} is a symbolic link: name the directory that it leads to")]
    Link {
        /// The link.
        path: PathBuf,
    },
    /// Something else has the name.
    #[error("{path} is no directory")]
    NotADirectory {
        /// What is there.
        path: PathBuf,
    },
    /// Its owner could exchange what is in it.
    #[error("{path} belongs to user {owner}, and this process runs as user {user}")]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who asks.
        user: u32,
    },
    /// Others may look into it or change it.
    #[error(
        "{path} has mode {mode:04o}, so other users can get at what is in it: look at its files, \
         then `chmod {wanted:04o}`"
    )]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// The mode that it must have.
        wanted: u32,
    },
    /// Others may put another directory in its place.
    #[error(
        "{above} (user {owner}, mode {mode:04o}) is above {path}, and others than this user and \
         root may change it"
    )]
    Above {
        /// The directory above.
        above: PathBuf,
        /// The directory that was asked for.
        path: PathBuf,
        /// Whose the one above is.
        owner: u32,
        /// Its mode.
        mode: u32,
    },
    /// There is no place on a disk that is this user's.
    #[error(
        "user {user} has no home directory, and neither VMFERRY_STATE_DIR nor XDG_STATE_HOME is set"
    )]
    NoHome {
        /// The user.
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

/// What the environment says of a process.
#[derive(Default)]
struct Surroundings {
    user: u32,
    runtime: Option<PathBuf>,
    state: Option<PathBuf>,
    xdg_runtime: Option<PathBuf>,
    xdg_state: Option<PathBuf>,
    home: Option<PathBuf>,
}

impl Surroundings {
    fn of_this_process() -> Self {
        let from = |name: &str| {
            std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
        };
        // The XDG base directory specification wants a relative path to be ignored.
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
        let in_login = self.xdg_runtime.map(|path| path.join("vmferry"));
        let of_state = self.xdg_state.or(self.home.map(|home| home.join(".local/state")));
        let older = match self.state {
            Some(_) => Vec::new(),
            None => older_places(self.user, in_login.as_deref()),
        };
        let state = match (self.state, of_state) {
            (Some(state), _) => state,
            (None, _) if self.user == 0 => "/var/lib/vmferry".into(),
            (None, Some(of_state)) => of_state.join("vmferry"),
            (None, None) => return Err(DirectoryError::NoHome { user: self.user }),
        };
        // The directory of a login vanishes when the user's last session ends, so root's sockets
        // are never there.
        let runtime = match in_login {
            _ if self.user == 0 => "/run/vmferry".into(),
            Some(in_login) => in_login,
            None => state.clone(),
        };
        Ok(Directories { runtime, state, older })
    }
}

/// Where releases before kept the journals of a user who had set none of vmferry's variables.
fn older_places(user: u32, in_login: Option<&Path>) -> Vec<PathBuf> {
    let mut places = vec![Path::new("/run/user").join(user.to_string()).join("vmferry")];
    if user == 0 {
        places.push("/run/vmferry".into());
    } else {
        places.push(format!("/tmp/vmferry-{user}").into());
    }
    places.extend(in_login.map(Path::to_owned));
    places.sort();
    places.dedup();
    places
}

impl Directories {
    /// The directories of this process's user. Nothing is made; what is there is checked.
    ///
    /// Sockets: `$VMFERRY_RUNTIME_DIR`, or `/run/vmferry` for root and `$XDG_RUNTIME_DIR/vmferry`
    /// for others, or where there is no such variable the directory of the state. Journals:
    /// `journal` in `$VMFERRY_STATE_DIR`, or in `$VMFERRY_RUNTIME_DIR`, or in `/var/lib/vmferry`
    /// for root and `$XDG_STATE_HOME/vmferry` for others, which is `~/.local/state/vmferry` if that
    /// variable is not set.
    ///
    /// # Errors
    /// If one of them is another user's, or can be changed or read by others, or there is no place
    /// for it.
    pub fn of_this_user() -> Result<Self, DirectoryError> {
        Surroundings::of_this_process().directories()?.checked()
    }

    /// Directories of the caller's choice.
    ///
    /// # Errors
    /// As [`of_this_user`](Self::of_this_user).
    pub fn at(runtime: PathBuf, state: PathBuf) -> Result<Self, DirectoryError> {
        Self { runtime, state, older: Vec::new() }.checked()
    }

    fn checked(self) -> Result<Self, DirectoryError> {
        let there = |path: &Path| path.symlink_metadata().is_ok();
        let check = |path: PathBuf| if there(&path) { check_private(&path) } else { Ok(path) };
        let checked =
            Self { runtime: check(self.runtime)?, state: check(self.state)?, older: self.older };
        if there(&checked.journals()) {
            check_journals(&checked.journals())?;
        }
        Ok(checked)
    }

    /// Makes what is missing, with mode 0700, so that it survives a crash of the host.
    ///
    /// # Errors
    /// As [`of_this_user`](Self::of_this_user), and if one can't be made.
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

    /// The directory that the journals' directory is in.
    #[must_use]
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Where the journals are kept.
    #[must_use]
    pub fn journals(&self) -> PathBuf {
        self.state.join("journal")
    }

    /// Where a release before may have left journals of this user: the directories that
    /// [`state`](Self::state) had then. Those that are there and are this user's alone.
    #[must_use]
    pub fn older(&self) -> Vec<PathBuf> {
        let is_older = |path: &&PathBuf| {
            check_private(path).is_ok_and(|path| path != self.state)
                && path.join("journal").is_dir()
                && check_journals(&path.join("journal")).is_ok()
        };
        self.older.iter().filter(is_older).cloned().collect()
    }

    /// The control socket of a guest by name; a name with a `/` is the path of one.
    #[must_use]
    pub fn socket(&self, guest: &str) -> PathBuf {
        if guest.contains('/') {
            PathBuf::from(guest)
        } else {
            self.runtime.join(format!("{guest}.sock"))
        }
    }

    /// The names of the guests whose sockets are here, whether or not they live.
    ///
    /// # Errors
    /// If the directory can't be read.
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

    fn places(surroundings: Surroundings) -> (String, String) {
        let Directories { runtime, state, .. } = surroundings.directories().unwrap();
        (runtime.display().to_string(), state.display().to_string())
    }

    fn some(path: &str) -> Option<PathBuf> {
        Some(path.into())
    }

    #[test]
    fn root_has_one_place_for_journals_whether_it_logged_in_or_not() {
        let cron = places(Surroundings::default());
        assert_eq!(cron, ("/run/vmferry".into(), "/var/lib/vmferry".into()));
        let login = Surroundings {
            xdg_runtime: some("/run/user/0"),
            xdg_state: some("/root/.state"),
            home: some("/root"),
            ..Surroundings::default()
        };
        assert_eq!(places(login), cron);
    }

    #[test]
    fn users_keep_journals_where_a_logout_leaves_them() {
        let user = || Surroundings {
            user: 1000,
            xdg_runtime: some("/run/user/1000"),
            home: some("/home/u"),
            ..Surroundings::default()
        };
        let state = "/home/u/.local/state/vmferry";
        assert_eq!(places(user()), ("/run/user/1000/vmferry".into(), state.into()));
        let cron = Surroundings { xdg_runtime: None, ..user() };
        assert_eq!(places(cron), (state.into(), state.into()), "never below /tmp");
        let xdg = Surroundings { xdg_state: some("/s"), ..user() };
        assert_eq!(places(xdg).1, "/s/vmferry");
        let homeless = Surroundings { user: 1000, ..Surroundings::default() };
        assert!(matches!(homeless.directories(), Err(DirectoryError::NoHome { user: 1000 })));
    }

    #[test]
    fn variables_of_vmferry_count_before_all_others() {
        let of = |runtime, state| {
            places(Surroundings {
                runtime,
                state,
                xdg_runtime: some("/run/user/0"),
                ..Surroundings::default()
            })
        };
        // As releases before had it: one variable for both.
        assert_eq!(of(some("/a"), None), ("/a".into(), "/a".into()));
        assert_eq!(of(some("/a"), some("/b")), ("/a".into(), "/b".into()));
        assert_eq!(of(None, some("/b")), ("/run/vmferry".into(), "/b".into()));
    }
}
