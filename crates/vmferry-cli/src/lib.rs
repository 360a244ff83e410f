//! The vmferry command.
