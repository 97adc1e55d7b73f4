#pragma once

#include "kernels/capability.h"
#include "kernels/gated.h"

// With gelu's tanh approximation, and without.
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_tanh)
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_erf)
