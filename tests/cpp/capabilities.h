#pragma once

#include <string>

#include <shoestring/ops.h>

#include "emulated.h"

/// Calls `test` once for each CPU capability of this machine, with the kernels that are compiled for it. In
/// the emulator, CUDA kernels run for every capability, so `test` is called once.
template <typename Test>
void for_each_capability(const Test& test) {
  const std::string before = shoestring::cpu_capability();
  for (const char* capability : {"plain", "avx2", "avx512", "amx"}) {
    if (!shoestring::set_cpu_capability(capability)) continue;
    test(capability);
    if (is_emulated()) break;
  }
  shoestring::set_cpu_capability(before);
}
