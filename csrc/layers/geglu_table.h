#pragma once

#include "core/capability.h"
#include "layers/gated_table.h"

// Kernels for GELU with the tanh approximation, and for the exact GELU.
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_tanh)
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_erf)
