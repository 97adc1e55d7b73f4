#pragma once

#include <dlfcn.h>

/// Whether the emulator runs CUDA's kernels in the place of the CPU's.
inline bool is_emulated() { return dlsym(RTLD_DEFAULT, "simt_set_capability") != nullptr; }
