//! The host that the guest leaves.

pub mod chooser;
pub mod encode;
pub mod freed;
pub mod hinted;
pub mod io;
pub mod machine;
pub mod plan;
pub mod rounds;

mod change;
mod connect;
mod control;
mod driver;
mod lane;
mod orders;
mod outgoing;
mod pool;
mod recovery;
mod redial;
mod signal;
mod streams;
mod window;

pub use change::Change;
pub use driver::{SourceOutcome, migrate, migrate_streamed};
pub use io::Report;
pub use orders::{Orders, Progress};
pub use recovery::{Recovered, recover};
