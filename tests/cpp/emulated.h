#pragma once

#include <dlfcn.h>

/// Returns whether the tests run CUDA's kernels in an emulator on the CPU, in place of the CPU's kernels.
inline bool is_emulated() { return dlsym(RTLD_DEFAULT, "simt_set_capability") != nullptr; }
