//! One line of text for any FPDU or startup frame.
