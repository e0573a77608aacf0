//! Atomic operations on one element, whose value is passed as 64 bits.

use crate::abi::*;

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A signed integer of this many bytes.
    Signed(usize),
    /// An unsigned integer of this many bytes.
    Unsigned(usize),
    /// `float`.
    Float,
    /// `double`.
    Double,
}

impl Type {
    /// Returns the type with a number of `enum fi_datatype`, or `None` if no operations are supported on it.
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            FI_INT8 => Self::Signed(1),
            FI_UINT8 => Self::Unsigned(1),
            FI_INT16 => Self::Signed(2),
            FI_UINT16 => Self::Unsigned(2),
            FI_INT32 => Self::Signed(4),
            FI_UINT32 => Self::Unsigned(4),
            FI_INT64 => Self::Signed(8),
            FI_UINT64 => Self::Unsigned(8),
            FI_FLOAT => Self::Float,
            FI_DOUBLE => Self::Double,
            _ => return None,
        })
    }

    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::Signed(size) | Self::Unsigned(size) => size,
            Self::Float => 4,
            Self::Double => 8,
        }
    }
}

/// The three classes of operations, which differ in operands and results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Changes the target.
    Write,
    /// Changes the target, or only reads it, and returns its former value.
    Fetch,
    /// Changes the target depending on a comparison or a mask, and returns its former value.
    Compare,
}

/// Returns whether the operation exists for this type and class.
pub fn is_valid(kind: Type, op: u32, class: Class) -> bool {
    let known = match class {
        Class::Write => op <= FI_BXOR || op == FI_ATOMIC_WRITE,
        Class::Fetch => op <= FI_ATOMIC_WRITE,
        Class::Compare => (FI_CSWAP..=FI_MSWAP).contains(&op),
    };
    let bits = matches!(op, FI_BOR | FI_BAND | FI_BXOR | FI_MSWAP);
    known && !(bits && matches!(kind, Type::Float | Type::Double))
}

/// The operations on the elements of a type. A logical operation treats each value except 0 as true.
trait Element: Copy + PartialOrd {
    fn from_bits(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn plus(self, with: Self) -> Self;
    fn times(self, with: Self) -> Self;
    fn truth(self) -> bool;
    fn of_truth(truth: bool) -> Self;
}

macro_rules! integer {
    ($($type:ty, $unsigned:ty;)*) => {$(
        impl Element for $type {
            fn from_bits(bits: u64) -> Self {
                bits as Self
            }
            fn bits(self) -> u64 {
                u64::from(self as $unsigned)
            }
            fn plus(self, with: Self) -> Self {
                self.wrapping_add(with)
            }
            fn times(self, with: Self) -> Self {
                self.wrapping_mul(with)
            }
            fn truth(self) -> bool {
                self != 0
            }
            fn of_truth(truth: bool) -> Self {
                Self::from(truth)
            }
        }
    )*};
}

integer! {
    i8, u8;
    u8, u8;
    i16, u16;
    u16, u16;
    i32, u32;
    u32, u32;
    i64, u64;
    u64, u64;
}

macro_rules! float {
    ($($type:ty, $bits:ty;)*) => {$(
        impl Element for $type {
            fn from_bits(bits: u64) -> Self {
                Self::from_bits(bits as $bits)
            }
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
            fn plus(self, with: Self) -> Self {
                self + with
            }
            fn times(self, with: Self) -> Self {
                self * with
            }
            fn truth(self) -> bool {
                self != 0.0
            }
            fn of_truth(truth: bool) -> Self {
                if truth { 1.0 } else { 0.0 }
            }
        }
    )*};
}

float! {
    f32, u32;
    f64, u64;
}

fn with_type<T: Element>(op: u32, old: u64, with: u64, than: u64) -> u64 {
    let (o, w, t) = (T::from_bits(old), T::from_bits(with), T::from_bits(than));
    let swapped = |holds: bool| if holds { with } else { old };
    let truth = |holds: bool| T::of_truth(holds).bits();
    match op {
        FI_MIN => swapped(w < o),
        FI_MAX => swapped(w > o),
        FI_SUM => o.plus(w).bits(),
        FI_PROD => o.times(w).bits(),
        FI_LOR => truth(o.truth() || w.truth()),
        FI_LAND => truth(o.truth() && w.truth()),
        FI_LXOR => truth(o.truth() != w.truth()),
        FI_BOR => old | with,
        FI_BAND => old & with,
        FI_BXOR => old ^ with,
        FI_ATOMIC_WRITE => with,
        FI_CSWAP => swapped(t == o),
        FI_CSWAP_NE => swapped(t != o),
        FI_CSWAP_LE => swapped(t <= o),
        FI_CSWAP_LT => swapped(t < o),
        FI_CSWAP_GE => swapped(t >= o),
        FI_CSWAP_GT => swapped(t > o),
        FI_MSWAP => (with & than) | (old & !than),
        _ => old,
    }
}

/// Returns the bits of the target after an operation. They are unchanged if the operation does not exist. `old` is the value
/// of the target, `with` the operand, and `than` the value to compare with, or the mask of `FI_MSWAP`.
pub fn compute(kind: Type, op: u32, old: u64, with: u64, than: u64) -> u64 {
    let f = match kind {
        Type::Signed(1) => with_type::<i8>,
        Type::Signed(2) => with_type::<i16>,
        Type::Signed(4) => with_type::<i32>,
        Type::Signed(_) => with_type::<i64>,
        Type::Unsigned(1) => with_type::<u8>,
        Type::Unsigned(2) => with_type::<u16>,
        Type::Unsigned(4) => with_type::<u32>,
        Type::Unsigned(_) => with_type::<u64>,
        Type::Float => with_type::<f32>,
        Type::Double => with_type::<f64>,
    };
    f(op, old, with, than)
}

/// Returns an element in memory as bits.
pub fn bits_of(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    for (to, from) in all.iter_mut().zip(bytes) {
        *to = *from;
    }
    u64::from_le_bytes(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_keep_their_width_and_sign() {
        let s = Type::Signed(1);
        let bits = |n: i8| u64::from(n as u8);
        assert_eq!(compute(s, FI_SUM, bits(127), bits(1), 0), bits(-128));
        assert_eq!(compute(s, FI_MIN, bits(1), bits(-1), 0), bits(-1));
        assert_eq!(compute(Type::Unsigned(1), FI_MIN, 1, 0xff, 0), 1);
        assert_eq!(
            compute(Type::Unsigned(2), FI_PROD, 300, 300, 0),
            90000 & 0xffff
        );
        assert_eq!(compute(Type::Unsigned(8), FI_SUM, u64::MAX, 2, 0), 1);
        assert_eq!(
            compute(Type::Unsigned(4), FI_BXOR, 0b1100, 0b1010, 0),
            0b0110
        );
        assert_eq!(compute(Type::Unsigned(4), FI_LXOR, 5, 6, 0), 0);
        assert_eq!(compute(Type::Unsigned(4), FI_LAND, 5, 6, 0), 1);
    }

    #[test]
    fn floats_are_computed_as_floats() {
        let bits = |x: f64| x.to_bits();
        let d = Type::Double;
        assert_eq!(compute(d, FI_SUM, bits(1.5), bits(-0.25), 0), bits(1.25));
        assert_eq!(compute(d, FI_MAX, bits(-1.0), bits(-2.0), 0), bits(-1.0));
        assert_eq!(compute(d, FI_LOR, bits(0.0), bits(3.0), 0), bits(1.0));
        let single = |x: f32| u64::from(x.to_bits());
        assert_eq!(
            compute(Type::Float, FI_PROD, single(2.0), single(3.5), 0),
            single(7.0)
        );
    }

    #[test]
    fn swaps_compare_the_given_value_with_the_stored_one() {
        let swap = |op, than| compute(Type::Signed(4), op, 10, 99, than);
        assert_eq!((swap(FI_CSWAP, 10), swap(FI_CSWAP, 11)), (99, 10));
        assert_eq!((swap(FI_CSWAP_NE, 10), swap(FI_CSWAP_NE, 11)), (10, 99));
        assert_eq!((swap(FI_CSWAP_LE, 10), swap(FI_CSWAP_LE, 11)), (99, 10));
        assert_eq!((swap(FI_CSWAP_LT, 9), swap(FI_CSWAP_LT, 10)), (99, 10));
        assert_eq!((swap(FI_CSWAP_GE, 10), swap(FI_CSWAP_GE, 9)), (99, 10));
        assert_eq!((swap(FI_CSWAP_GT, 11), swap(FI_CSWAP_GT, 10)), (99, 10));
        assert_eq!(
            compute(Type::Unsigned(1), FI_MSWAP, 0b1010, 0b0101, 0b0011),
            0b1001
        );
    }

    #[test]
    fn not_all_types_have_all_operations() {
        assert!(is_valid(Type::Double, FI_SUM, Class::Write));
        assert!(!is_valid(Type::Double, FI_BOR, Class::Write));
        assert!(!is_valid(Type::Signed(4), FI_ATOMIC_READ, Class::Write));
        assert!(is_valid(Type::Signed(4), FI_ATOMIC_READ, Class::Fetch));
        assert!(!is_valid(Type::Signed(4), FI_CSWAP, Class::Fetch));
        assert!(is_valid(Type::Float, FI_CSWAP_LE, Class::Compare));
        assert!(!is_valid(Type::Float, FI_MSWAP, Class::Compare));
        assert!(!is_valid(Type::Signed(4), FI_SUM, Class::Compare));
        assert!(!is_valid(Type::Signed(4), 19, Class::Compare));
        assert_eq!(Type::from_number(10), None);
    }
}
