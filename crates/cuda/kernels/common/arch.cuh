// The architecture that is compiled for.
#pragma once

// The first number of its compute capability: 8, 9, 10 or 12. The compiler for 10 and 12 loads further ahead than for 8 and 9: where
// registers are short, kernels are told to take less at a time there, or ask for fewer blocks per multiprocessor.
constexpr int MAJOR = __CUDA_ARCH__ / 100;
// Whether blocks of a multiprocessor have 227 KiB of shared memory together; elsewhere it is 163 (8.0) or 99.
constexpr bool LARGE = MAJOR == 9 || MAJOR == 10;
