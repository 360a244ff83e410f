//! Channels between two hosts: TCP, Unix sockets and mutually authenticated TLS 1.3, with a rate limit.
