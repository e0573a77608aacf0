//! Public symbols without an implementation yet.
//!
//! Every Debian binary is linked with BIND_NOW, so a program that never calls `ibv_reg_dmabuf_mr` still does
//! not start if it is missing. Each function here fails the way its manual page says, with
//! `ENOSYS`; none pretends success. When an entry point is written, its name leaves this file
//! (the linker reports a name that is in both places).

use crate::refuse;
use libc::ENOSYS;

refuse! { ENOSYS;
    // Return a pointer: null and errno.
    null {
        ibv_reg_dmabuf_mr,
    }
}
