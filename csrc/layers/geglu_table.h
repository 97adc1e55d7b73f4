#pragma once

#include "core/capability.h"
#include "layers/gated_table.h"

// With gelu's tanh approximation, and without.
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_tanh)
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_erf)
