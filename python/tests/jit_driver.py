"""A stand-in for the NVIDIA driver: a small C library that keeps "device" memory on the host and knows a few kernels.
With it the launches of ironhorse.jit, from Python through Rust to the driver's functions, run where there is no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

DECLARED = Path(__file__).parents[2] / "crates" / "cuda" / "src" / "ffi" / "driver.rs"

C = r"""
#include <stdlib.h>
#include <string.h>
typedef unsigned u32;
typedef unsigned long long u64;
static int lost = 0, held = 0, loads = 0;
static _Thread_local void* current = 0;
int held_now(void) { return __atomic_load_n(&held, __ATOMIC_SEQ_CST); }
int loads_now(void) { return loads; }
u32 cuInit(u32 flags) { return 0; }
u32 cuDriverGetVersion(int* v) { *v = 13000; return 0; }
u32 cuGetErrorName(u32 c, const char** n) { *n = c == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR"; return 0; }
u32 cuGetErrorString(u32 c, const char** n) { *n = "in the driver's words"; return 0; }
u32 cuDeviceGetCount(int* n) { *n = 1; return 0; }
u32 cuDeviceGet(int* d, int i) { *d = i; return 0; }
u32 cuDeviceGetName(char* n, int l, int d) { strcpy(n, "Stand-in"); return 0; }
u32 cuDeviceGetAttribute(int* v, u32 which, int d) {
    *v = which == 75 ? 9 : which == 76 ? 0 : which == 97 ? 232448 : 132;
    return 0;
}
u32 cuDeviceTotalMem_v2(size_t* s, int d) { *s = 1ull << 37; return 0; }
u32 cuDevicePrimaryCtxRetain(void** c, int d) { *c = (void*)16; return 0; }
u32 cuCtxGetCurrent(void** c) { *c = current; return 0; }
u32 cuCtxSetCurrent(void* c) { current = c; return 0; }
u32 cuMemAllocAsync(u64* p, size_t n, void* s) {
    if (!current) return 201;
    *p = (u64)malloc(n);
    memset((void*)*p, 0x7f, n);
    __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
    return 0;
}
u32 cuMemFreeAsync(u64 p, void* s) { free((void*)p); __atomic_sub_fetch(&held, 1, __ATOMIC_SEQ_CST); return 0; }
u32 cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t n, void* s) { memcpy((void*)to, from, n); return 0; }
u32 cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t n, void* s) { memcpy(to, (void*)from, n); return 0; }
u32 cuStreamSynchronize(void* s) { return lost ? 700 : 0; }
u32 cuModuleLoadData(void** m, const void* d) {
    *m = (void*)16;
    loads++;
    return memcmp(d, "\177ELF", 4) || !current ? 200 : 0;
}
u32 cuModuleGetFunction(void** f, void* m, const char* n) { *f = strdup(n); return 0; }
u32 cuFuncGetAttribute(int* v, u32 which, void* f) {
    *v = which == 0 ? (strcmp(f, "heavy") ? 1024 : 512) : which == 4 ? 40 : 0;
    return 0;
}
u32 cuFuncSetAttribute(void* f, u32 which, int v) { return which == 8 ? 0 : 1; }
u32 cuLaunchKernelEx(const u32* config, void* f, void** a, void** e) {
    const u32 gx = config[0], bx = config[3];
    if (!current) return 201;
    if (!strcmp(f, "scale")) {
        const float *x = *(float**)a[0], k = *(float*)a[3];
        float* y = *(float**)a[1];
        for (long i = 0; i < *(long*)a[2] && i < (long)gx * bx; i++) y[i] = k * x[i];
    }
    if (!strcmp(f, "numbers")) {
        const double v[] = {*(unsigned char*)a[1], *(signed char*)a[2], *(unsigned char*)a[3], *(short*)a[4],
            *(unsigned short*)a[5], *(int*)a[6], *(u32*)a[7], *(long*)a[8], *(u64*)a[9], *(float*)a[10],
            *(double*)a[11], *(unsigned short*)a[12], *(unsigned short*)a[13]};
        memcpy(*(void**)a[0], v, sizeof v);
    }
    if (!strcmp(f, "wild")) lost = 1;
    return 0;
}
"""


def build(folder: Path) -> Path | None:
    """The library as libcuda.so.1 in a folder; None without a C compiler or the source that says what is called."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not DECLARED.exists():
        return None
    called = re.findall(r"^    fn (cu\w+)\(", DECLARED.read_text(), re.MULTILINE)
    others = [name for name in called if not re.search(rf"^u32 {name}\(", C, re.MULTILINE)]
    source = folder / "driver.c"
    source.write_text(C + "".join(f"u32 {name}(void) {{ return 999; }}\n" for name in others))
    subprocess.run([compiler, "-w", "-O1", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder / "libcuda.so.1"
