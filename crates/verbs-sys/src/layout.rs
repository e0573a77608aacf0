//! Macros that declare C types and constants, so that a test can compare them with the C header.
//!
//! [`c_types!`] declares `#[repr(C)]` types and [`c_consts!`] constants. In test builds both also generate a table of their
//! declarations. The test at the end of this file prints the same table from the distribution's headers with a C compiler and
//! compares the two, so nothing has to be listed twice.

/// Declares `#[repr(C)]` structs and unions with the names of the C header.
///
/// All fields are public. All-zero bytes are valid for every type, and [`Default`] returns them. `= "type"` gives the C spelling of a
/// type that has no tag in C, and `=> "field"` the C name of a field that is anonymous there.
macro_rules! c_types {
    ($(
        $(#[$meta:meta])*
        $kind:ident $name:ident $(= $c_type:literal)? {
            $( $(#[$field_meta:meta])* $field:ident : $type:ty $(=> $c_field:literal)? ),* $(,)?
        }
    )*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name {
                $( $(#[$field_meta])* pub $field: $type ),*
            }

            impl Default for $name {
                /// All bytes zero: null pointers, no functions, zero numbers.
                #[inline]
                fn default() -> Self {
                    // SAFETY: only integers, raw pointers, optional function pointers, pthread objects, and arrays or structs
                    // of these are declared here; zero bytes are valid for each.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*

        #[cfg(test)]
        pub(crate) fn layout() -> Vec<crate::layout::CType> {
            /// The size of the field that `project` returns.
            fn size<T, F>(_project: fn(*const T) -> *const F) -> usize {
                size_of::<F>()
            }
            vec![$(
                crate::layout::CType {
                    name: crate::layout::c_name(
                        concat!(stringify!($kind), " ", stringify!($name)),
                        &[$($c_type)?],
                    ),
                    size: size_of::<$name>(),
                    align: align_of::<$name>(),
                    fields: vec![$(
                        crate::layout::CField {
                            name: crate::layout::c_name(stringify!($field), &[$($c_field)?]),
                            offset: std::mem::offset_of!($name, $field),
                            // SAFETY: the function is never called; only its type is used.
                            size: size(|object: *const $name| unsafe { &raw const (*object).$field }),
                        }
                    ),*],
                }
            ),*]
        }
    };
}

/// Declares constants with the names and values of the C header: `TYPE { NAME = value, … }`.
macro_rules! c_consts {
    ($( $type:ty { $( $name:ident = $value:expr ),* $(,)? } )*) => {
        $($( pub const $name: $type = $value; )*)*

        #[cfg(test)]
        pub(crate) fn constants() -> Vec<(&'static str, i128)> {
            vec![$($( (stringify!($name), i128::from($name)) ),*),*]
        }
    };
}

pub(crate) use {c_consts, c_types};

/// A type as the Rust compiler lays it out, under its C name.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct CType {
    pub(crate) name: String,
    pub(crate) size: usize,
    pub(crate) align: usize,
    pub(crate) fields: Vec<CField>,
}

/// A field as the Rust compiler lays it out, under its C name.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct CField {
    pub(crate) name: String,
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

/// Returns the C spelling: the given one, otherwise the Rust one without `r#`.
#[cfg(test)]
pub(crate) fn c_name(rust: &str, given: &[&str]) -> String {
    given
        .first()
        .map_or_else(|| rust.replace("r#", ""), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::CType;
    use std::fmt::Write as _;
    use std::process::Command;

    /// A line that the C program prints, and the expected number.
    struct Question {
        what: String,
        ours: i128,
    }

    /// Returns the C program that prints all sizes, offsets and values, and the expected output.
    fn program(types: &[CType], constants: &[(&str, i128)]) -> (String, Vec<Question>) {
        let mut source = String::from(
            "#include <stdio.h>\n\
             #include <stddef.h>\n\
             #include <time.h>\n\
             #include <infiniband/verbs.h>\n\
             #include <infiniband/sa.h>\n\
             #include <rdma/rdma_cma.h>\n\
             #include <rdma/rdma_verbs.h>\n\
             #include <rdma/rsocket.h>\n\
             #include <rdma/ib_user_verbs.h>\n\
             #include <rdma/ib_user_sa.h>\n\
             #include <infiniband/anywarpdv.h>\n\
             #define P(x) printf(\"%lld\\n\", (long long)(x))\n\
             int main(void) {\n",
        );
        let mut questions = Vec::new();
        let mut ask = |c: String, ours: i128| {
            writeln!(source, "P({c});").unwrap();
            questions.push(Question { what: c, ours });
        };
        for t in types {
            let name = &t.name;
            ask(format!("sizeof({name})"), t.size as i128);
            ask(format!("_Alignof({name})"), t.align as i128);
            for f in &t.fields {
                let field = &f.name;
                ask(format!("offsetof({name}, {field})"), f.offset as i128);
                ask(format!("sizeof((({name} *)0)->{field})"), f.size as i128);
            }
        }
        for (name, value) in constants {
            // C prints a `long long`; 64-bit masks are compared as the same bits.
            ask((*name).to_owned(), i128::from(*value as i64));
        }
        source.push_str("return 0; }\n");
        (source, questions)
    }

    /// Every size, alignment, offset and constant equals that in the headers of the distribution and of this project.
    #[test]
    fn layout_and_constants_equal_the_headers() {
        let mut types = crate::verbs::layout();
        types.extend(crate::kern::layout());
        types.extend(crate::cm::layout());
        types.extend(crate::dv::layout());
        types.push(crate::dv::counters_layout());
        let mut constants = crate::verbs::constants();
        constants.extend(crate::cm::constants());
        constants.extend(crate::dv::constants());
        let (source, questions) = program(&types, &constants);

        let dir = std::env::temp_dir().join(format!("anywarp-layout-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (c, exe) = (dir.join("layout.c"), dir.join("layout"));
        std::fs::write(&c, source).unwrap();
        let cc = Command::new("cc")
            .args([
                "-w",
                "-I",
                concat!(env!("CARGO_MANIFEST_DIR"), "/../abi/include"),
                "-o",
            ])
            .args([&exe, &c])
            .output()
            .unwrap();
        assert!(
            cc.status.success(),
            "{}",
            String::from_utf8_lossy(&cc.stderr)
        );
        let printed = String::from_utf8(Command::new(&exe).output().unwrap().stdout).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();

        let theirs: Vec<i128> = printed.lines().map(|l| l.parse().unwrap()).collect();
        assert_eq!(theirs.len(), questions.len());
        let wrong: Vec<String> = questions
            .iter()
            .zip(theirs)
            .filter(|(q, theirs)| q.ours != *theirs)
            .map(|(q, theirs)| format!("{}: {} in C, {} here", q.what, theirs, q.ours))
            .collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
