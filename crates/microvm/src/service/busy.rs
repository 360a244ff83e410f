//! Who uses the guest's dirty log.

use vmferry::destination::{FetchHandle, FetchProgress};
use vmferry::source::Orders;
use vmferry_control::{ControlError, ErrorCode};

/// The current user of the guest's dirty log, of which there is only one.
#[derive(Default)]
pub(super) enum Busy {
    #[default]
    Idle,
    /// The guest came with post-copy, and has not all of its pages yet.
    Fetching(FetchHandle),
    Migrating(Orders),
    Estimating,
}

impl Busy {
    /// Why the dirty log can't be used now.
    pub(super) fn refuse(&self) -> Result<(), ControlError> {
        let text = match self {
            Self::Idle => return Ok(()),
            Self::Fetching(fetch) => match fetch.progress() {
                None => return Ok(()),
                Some(progress) => still_missing(&progress),
            },
            Self::Migrating(_) => "a migration of this guest is under way: \
                 `vmferry status` shows it, `vmferry cancel` ends it"
                .to_owned(),
            Self::Estimating => {
                "this guest is watched by `vmferry estimate`: wait until that has ended".to_owned()
            }
        };
        Err(ControlError::new(ErrorCode::Busy, text))
    }
}

/// Why nothing can be done with a guest that lacks pages.
pub(super) fn still_missing(progress: &FetchProgress) -> String {
    let FetchProgress { source, remaining_pages, .. } = progress;
    match remaining_pages {
        0 => "this guest's last pages have just arrived, and the journal does not say so yet: try \
              again when `vmferry status` shows no missing pages"
            .to_owned(),
        pages => format!(
            "{pages} pages of this guest are still missing: they are at {source}, and are fetched \
             while the guest runs ({}); wait until `vmferry status` shows no missing pages",
            progress.time_left()
        ),
    }
}
