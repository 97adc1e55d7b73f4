#pragma once

#include "core/capability.h"
#include "layers/gated_table.h"

// CPU kernels of geglu: with the tanh approximation of GELU, and with the exact GELU.
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_tanh)
SHOESTRING_CPU_TABLE(kernels::GatedTable, geglu_erf)
