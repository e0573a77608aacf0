//! Functions with variable arguments. The oldest supported version of Rust cannot define them.

use libc::c_void;
use std::mem::MaybeUninit;

/// The register of the argument with this index, if the arguments before it are integers or addresses.
#[cfg(target_arch = "x86_64")]
macro_rules! register {
    (2) => {
        "rdx"
    };
    (3) => {
        "rcx"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! register {
    (2) => {
        "x2"
    };
    (3) => {
        "x3"
    };
}

/// The body of a function with `$named` arguments, which are integers or addresses, and variable arguments: makes a `va_list` of the variable
/// ones, and calls `$list` with the named arguments and the address of the `va_list`.
#[cfg(target_arch = "x86_64")]
macro_rules! with_list {
    ($list:path, $named:tt) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            // The list at 0; the save area at 32, with the general registers and then the vector registers.
            "sub rsp, 216",
            ".cfi_adjust_cfa_offset 216",
            "mov [rsp + 32], rdi",
            "mov [rsp + 40], rsi",
            "mov [rsp + 48], rdx",
            "mov [rsp + 56], rcx",
            "mov [rsp + 64], r8",
            "mov [rsp + 72], r9",
            "test al, al",
            "je 2f",
            "movaps [rsp + 80], xmm0",
            "movaps [rsp + 96], xmm1",
            "movaps [rsp + 112], xmm2",
            "movaps [rsp + 128], xmm3",
            "movaps [rsp + 144], xmm4",
            "movaps [rsp + 160], xmm5",
            "movaps [rsp + 176], xmm6",
            "movaps [rsp + 192], xmm7",
            "2:",
            concat!("mov dword ptr [rsp], 8 * ", $named),
            "mov dword ptr [rsp + 4], 48",
            "lea rax, [rsp + 224]",
            "mov [rsp + 8], rax",
            "lea rax, [rsp + 32]",
            "mov [rsp + 16], rax",
            concat!("mov ", $crate::hooks::variadic::register!($named), ", rsp"),
            "call {list}",
            "add rsp, 216",
            ".cfi_adjust_cfa_offset -216",
            "ret",
            ".cfi_endproc",
            list = sym $list,
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! with_list {
    ($list:path, $named:tt) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            // The list at 16; the general registers x2 to x7 at 48, and the vector registers at 96.
            "stp x29, x30, [sp, #-256]!",
            ".cfi_def_cfa_offset 256",
            ".cfi_offset x29, -256",
            ".cfi_offset x30, -248",
            "mov x29, sp",
            "stp x2, x3, [sp, #48]",
            "stp x4, x5, [sp, #64]",
            "stp x6, x7, [sp, #80]",
            "stp q0, q1, [sp, #96]",
            "stp q2, q3, [sp, #128]",
            "stp q4, q5, [sp, #160]",
            "stp q6, q7, [sp, #192]",
            "add x8, sp, #256",
            "str x8, [sp, #16]",
            "add x8, sp, #96",
            "str x8, [sp, #24]",
            "add x8, sp, #224",
            "str x8, [sp, #32]",
            concat!("mov w8, #-8 * (8 - ", $named, ")"),
            "str w8, [sp, #40]",
            "mov w8, #-128",
            "str w8, [sp, #44]",
            concat!("add ", $crate::hooks::variadic::register!($named), ", sp, #16"),
            "bl {list}",
            "ldp x29, x30, [sp], #256",
            "ret",
            ".cfi_endproc",
            list = sym $list,
        )
    };
}

pub(super) use {register, with_list};

/// The memory of a `va_list`, with at least its size. `with_list` reserves that many bytes for one.
type Place = MaybeUninit<[u64; 4]>;

/// Returns the place of the next argument of a `va_list`, for [`go_to`].
///
/// # Safety
/// `list` is the address of the `va_list` of [`with_list`].
pub(super) unsafe fn place(list: *const c_void) -> Place {
    // SAFETY: upheld by the caller.
    unsafe { list.cast::<Place>().read() }
}

/// Goes back to an argument of a `va_list`.
///
/// # Safety
/// `place` is a place of this list.
pub(super) unsafe fn go_to(list: *mut c_void, place: Place) {
    // SAFETY: upheld by the caller.
    unsafe { list.cast::<Place>().write(place) }
}

/// Returns the next argument, an address, of a `va_list`.
///
/// # Safety
/// `list` is the address of a `va_list` whose next argument is an address.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn next(list: *mut c_void) -> *const c_void {
    #[repr(C)]
    struct List {
        general: u32,
        vector: u32,
        stack: *const *const c_void,
        saved: *const u8,
    }
    const GENERAL: u32 = 48;
    // SAFETY: upheld by the caller; this is the layout of the processor's ABI.
    unsafe {
        let list = &mut *list.cast::<List>();
        if list.general < GENERAL {
            let at = list.saved.add(list.general as usize);
            list.general += 8;
            return at.cast::<*const c_void>().read();
        }
        let at = list.stack;
        list.stack = at.add(1);
        at.read()
    }
}

/// Returns the next argument, an address, of a `va_list`.
///
/// # Safety
/// `list` is the address of a `va_list` whose next argument is an address.
#[cfg(target_arch = "aarch64")]
pub(super) unsafe fn next(list: *mut c_void) -> *const c_void {
    #[repr(C)]
    struct List {
        stack: *const *const c_void,
        general_end: *const u8,
        vector_end: *const u8,
        general: i32,
        vector: i32,
    }
    // SAFETY: upheld by the caller; this is the layout of the processor's ABI.
    unsafe {
        let list = &mut *list.cast::<List>();
        if list.general < 0 {
            let at = list.general_end.offset(list.general as isize);
            list.general += 8;
            return at.cast::<*const c_void>().read();
        }
        let at = list.stack;
        list.stack = at.add(1);
        at.read()
    }
}
