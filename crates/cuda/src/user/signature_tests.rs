use super::*;

fn one(text: &str) -> Signature {
    let mut found = read(text, &[], &[]);
    assert_eq!(found.len(), 1, "{text}: {found:?}");
    found.remove(0)
}

/// `const float* x` and so on.
fn types(signature: &Signature) -> Vec<String> {
    let show = |p: &Parameter| {
        let (constant, stars) = (if p.constant { "const " } else { "" }, "*".repeat(p.pointers as usize));
        format!("{constant}{}{stars} {}", p.base, p.name).trim_end().to_owned()
    };
    signature.parameters.iter().map(show).collect()
}

#[test]
fn plain_kernels() {
    let k = one(
        "\nextern \"C\" __global__ void scale(const float* __restrict__ x, float *y, long long n, float a) {}",
    );
    assert_eq!((k.name.as_str(), k.line, k.c_linkage), ("scale", 2, true));
    assert_eq!(
        types(&k),
        ["const float* x", "float* y", "long long n", "const float a"]
            .map(|t| t.replace("const float a", "float a"))
    );
    assert!(one("__global__ void f(void) {}").parameters.is_empty());
    assert!(one("__global__ void f() {}").parameters.is_empty());
    assert!(!one("__global__ void f();").c_linkage);
}

#[test]
fn orders_qualifiers_and_attributes() {
    for text in [
        "static __global__ void __launch_bounds__(256, 2) f(float const* const x, unsigned n) {}",
        "__launch_bounds__(256) __global__ void f(const float *__restrict x, unsigned n = 3) {}",
        "void __global__ f(volatile const float x[], const unsigned n) {}",
        "[[maybe_unused]] __global__ void __maxnreg__(64) f(const float x[16], unsigned /* \" */ n) // {\n{}",
        "__global__ __attribute__((noinline)) void f(float const x[], unsigned n) {}",
    ] {
        let k = one(text);
        let kinds: Vec<_> =
            k.parameters.iter().map(|p| (p.name.as_str(), p.base.as_str(), p.pointers)).collect();
        assert_eq!((k.name.as_str(), kinds), ("f", vec![("x", "float", 1), ("n", "unsigned", 0)]), "{text}");
        assert!(k.parameters[0].constant, "{text}");
    }
}

#[test]
fn templates() {
    let k = one(
        "template <class T, typename U = float, int N = (4 > 2 ? 1 : 2), bool B = false>\n__global__ void f(const T* x, Vec<U, 4>* y, T* const* z, long n) {}",
    );
    let template: Vec<_> = k.template.iter().map(|p| (&*p.kind, &*p.name, &*p.default)).collect();
    let want =
        [("class", "T", ""), ("class", "U", "float"), ("int", "N", "(4>2?1:2)"), ("bool", "B", "false")];
    assert_eq!(template, want);
    assert_eq!(types(&k), ["const T* x", "Vec<U,4>* y", "T** z", "long n"]);
    let text = "template <class T> __global__ void f(T* x) {}\ntemplate <> __global__ void f<int>(int* x) {}";
    assert_eq!(one(text).template.len(), 1, "a specialisation is not another kernel");
}

#[test]
fn names_of_types() {
    let text = "typedef unsigned int u32; using scalar = float; typedef const scalar* in; using T = double;
        template <class T> using Out = T*;
        __global__ void f(in x, scalar* y, u32 n, std::uint64_t m, unsigned long, struct Big b, float& r, T t, int (*g)(int)) {}";
    let k = one(text);
    let want = [
        "const float* x",
        "float* y",
        "unsigned int n",
        "std::uint64_t m",
        "unsigned long",
        "Big b",
        "float& r",
        "double t",
    ];
    assert_eq!(types(&k)[..8], want);
    let generic = one("using T = double; template <class T> __global__ void f(T* x) {}");
    assert_eq!(types(&generic), ["T* x"], "the template's own T");
}

#[test]
fn macros_and_flags() {
    let text = "#define KERNEL extern \"C\" __global__ void\n#define A(x) __global__ void x(int)\n# define REAL \\\n  float\nKERNEL f(REAL* x, T t) {}";
    let found = read(text, &[], &["-DT=double".into(), "-DFLAG".into()]);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].line, found[0].c_linkage), (5, true));
    assert_eq!(types(&found[0]), ["float* x", "double t"]);
    assert_eq!(
        one("#define f f\n#define a b\n#define b a\n__global__ void f(a* b) {}").parameters[0].pointers,
        1
    );
}

#[test]
fn scopes() {
    let text = "namespace a { namespace b::c { struct S { int x; }; __global__ void f(int* x) { if (x) { *x = 1; } } }
        __global__ void g() {} }
        extern \"C\" { __global__ void h() {} }
        namespace { __global__ void i() {} }";
    let found = read(text, &[], &[]);
    let names: Vec<_> = found.iter().map(|k| (k.name.as_str(), k.c_linkage)).collect();
    assert_eq!(names, [("a::b::c::f", false), ("a::g", false), ("h", true), ("i", false)]);
}

#[test]
fn what_is_not_code_is_not_read() {
    let text =
        "// __global__ void a() {}\n/* __global__ void b() {}\n*/ const char* s = \"__global__ void c() {}\";
        auto r = R\"x(\n__global__ void d() {} )\" )x\"; char q = '\"';\n__global__ void e(int) {}";
    let k = one(text);
    assert_eq!((k.name.as_str(), k.line), ("e", 6));
}

#[test]
fn declared_twice_is_one_and_overloaded_is_two() {
    assert_eq!(read("__global__ void f(int* a); __global__ void f(int* b) {}", &[], &[]).len(), 1);
    assert_eq!(read("__global__ void f(int* a); __global__ void f(float* b) {}", &[], &[]).len(), 2);
    let header = read("#include \"x.h\"", &["__global__ void f(int* a) {}"], &[]);
    assert_eq!((header.len(), header[0].line), (1, 0));
}

#[test]
fn nothing_makes_it_fail() {
    let pieces = [
        "__global__",
        "void",
        "f",
        "(",
        ")",
        "<",
        ">",
        "template",
        "{",
        "}",
        "\"",
        "'",
        "R\"",
        "/*",
        "#define",
        "\n",
        ",",
        "*",
        "[",
        "\\",
        "=",
        "extern",
        "\"C\"",
        "é",
        ";",
        "namespace",
        "typedef",
        "using",
        "::",
    ];
    let mut state = 12345_u64;
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..state % 23 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            text.push_str(pieces[(state >> 33) as usize % pieces.len()]);
            text.push(if state & 64 == 0 { ' ' } else { '\t' });
        }
        state = state.wrapping_add(0x9e3779b97f4a7c15);
        read(&text, &[&text], &[format!("-D{text}")]);
    }
}
