//! The shim that carries segments over UDP.
