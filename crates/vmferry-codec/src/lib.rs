//! Page encodings: how guest pages become the payload of a frame and pages again.
