#pragma once

#include <dlfcn.h>

/// Returns whether operators on CPU tensors run the CUDA kernels in the emulator, in place of the CPU
/// kernels.
inline bool is_emulated() { return dlsym(RTLD_DEFAULT, "simt_set_capability") != nullptr; }
