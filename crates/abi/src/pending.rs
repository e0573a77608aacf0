//! Public functions for features that this device does not have.
//!
//! Debian's binaries are linked with BIND_NOW, so a program that refers to `ibv_reg_dmabuf_mr` does not start without the
//! symbol, even if it never calls it. Each function here fails with the errno of a device without the feature. Programs rely
//! on the value: if `ibv_reg_dmabuf_mr` fails with another errno than `EOPNOTSUPP`, NCCL concludes that the device supports
//! dma-buf.

use crate::refuse;
use libc::EOPNOTSUPP;

refuse! { EOPNOTSUPP;
    // These return a pointer: null, with errno set.
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
