//! Public functions of what this device does not have.
//!
//! Every Debian binary is linked with BIND_NOW, so a program that never calls `ibv_reg_dmabuf_mr` still does
//! not start if it is missing. Each function here fails with the number that a device without it gives, by which programs
//! learn that: NCCL takes any other than `EOPNOTSUPP` for a device that has dma-buf.

use crate::refuse;
use libc::EOPNOTSUPP;

refuse! { EOPNOTSUPP;
    // Return a pointer: null and errno.
    null {
        ibv_alloc_dmah, ibv_reg_dmabuf_mr,
    }
    code {
        ibv_dealloc_dmah,
    }
    minus_one {
        ibv_dm_export_dmabuf_fd,
    }
}
