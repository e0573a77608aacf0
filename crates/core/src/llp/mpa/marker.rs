//! MPA markers.
