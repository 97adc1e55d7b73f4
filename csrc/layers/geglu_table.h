#pragma once

#include "core/elementwise_table.h"

// CPU kernels of geglu and gelu: with the tanh approximation of GELU, and with the exact GELU.
SHOESTRING_CPU_TABLE(kernels::ElementwiseTable, geglu_tanh)
SHOESTRING_CPU_TABLE(kernels::ElementwiseTable, geglu_erf)
SHOESTRING_CPU_TABLE(kernels::ElementwiseTable, gelu_tanh)
SHOESTRING_CPU_TABLE(kernels::ElementwiseTable, gelu_erf)
