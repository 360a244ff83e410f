//! The type numbers of control messages. Numbers are never reused.

/// BEGIN.
pub const BEGIN: u16 = 1;
/// ACCEPT.
pub const ACCEPT: u16 = 2;
/// REFUSE.
pub const REFUSE: u16 = 3;
/// PLACED.
pub const PLACED: u16 = 4;
/// FINAL.
pub const FINAL: u16 = 5;
/// READY.
pub const READY: u16 = 6;
/// VERIFY.
pub const VERIFY: u16 = 7;
/// VERIFIED.
pub const VERIFIED: u16 = 8;
/// COMMIT.
pub const COMMIT: u16 = 9;
/// RUNNING.
pub const RUNNING: u16 = 10;
/// ABORTED.
pub const ABORTED: u16 = 11;
/// ABORT.
pub const ABORT: u16 = 12;
/// PING.
pub const PING: u16 = 13;
/// PONG.
pub const PONG: u16 = 14;
/// QUERY.
pub const QUERY: u16 = 15;
/// ANSWER.
pub const ANSWER: u16 = 16;
/// WITHDRAW.
pub const WITHDRAW: u16 = 17;
/// FREE.
pub const FREE: u16 = 18;
/// LACKING.
pub const LACKING: u16 = 19;
