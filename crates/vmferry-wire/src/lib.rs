//! The wire format, sans-IO: greetings, control messages and page frames as bytes and as typed values.
